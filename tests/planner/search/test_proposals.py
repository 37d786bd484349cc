"""What the search proposes runs: random recipes and topologies, at trace depth."""

import dataclasses
import math

import pytest
from proposals import Pair, check_devices, proposal, random_pair
from slow_values import mostly_slow

from jaxrl.planner.search.mapping_choice import propose

# 131 has ZeRO-1, 148 stages of one layer, and 263 rows that are mostly empty.
FAST = (2, 131, 263)


@pytest.mark.slow
@pytest.mark.parametrize("seed", FAST)
def test_a_proposal_runs(seed, tmp_path):
    assert proposal(random_pair(seed), tmp_path) == ""


# Several pools on several hosts of GPUs and of TPUs.
APART = (8, 32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", APART)
def test_a_proposal_runs_with_pools_on_every_host(seed, tmp_path):
    pair = random_pair(seed)
    assert pair.cluster.num_hosts > 1
    found, _ = propose(pair.config, pair.cluster)
    assert len(found.pools) > 1
    assert proposal(pair, tmp_path) == ""


def with_pages(pair: Pair) -> Pair:
    return dataclasses.replace(pair, overrides=pair.overrides | {"rollout.cache": "paged"})


@pytest.mark.long
@pytest.mark.parametrize("seed", mostly_slow(FAST, fast=(2,)))
def test_a_proposal_with_pages_runs(seed, tmp_path):
    assert proposal(with_pages(random_pair(seed)), tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 260, 20))
def test_sixty_proposals_with_pages_run(first, tmp_path):
    pairs = (with_pages(random_pair(seed)) for seed in range(first, first + 20))
    refused = [proposal(pair, tmp_path) for pair in pairs]
    assert sum(map(bool, refused)) <= 8, refused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_two_hundred_proposals_run(first, tmp_path):
    refused = [proposal(random_pair(seed), tmp_path) for seed in range(first, first + 20)]
    # Models that do not fit are the only reason to propose nothing.
    assert sum(map(bool, refused)) <= 8, refused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, 500, 10))
def test_two_hundred_proposals_for_several_hosts_run(first, tmp_path):
    pairs = [random_pair(seed, least_hosts=2) for seed in range(first, first + 10)]
    assert all(pair.cluster.num_hosts > 1 for pair in pairs)
    refused = [proposal(pair, tmp_path) for pair in pairs]
    assert sum(map(bool, refused)) <= 4, refused


@pytest.mark.long
def test_a_run_has_the_rows_that_were_simulated_and_its_pools_on_every_host():
    # The fastest mapping has different numbers of rows, so the search is repeated with common ones. It then
    # finds a mapping whose roles would do with fewer, and which is slower with these.
    pair = random_pair(8)
    found, proposed = propose(pair.config, pair.cluster)
    parts = {role.layout.row_parts for role in found.roles.values()}
    assert found.common_rows > math.lcm(*parts)
    assert proposed.train.rows == found.common_rows
    assert all(proposed.train.rows % part == 0 for part in parts)
    assert len(found.pools) > 1 and pair.cluster.num_hosts > 1
    check_devices(proposed, pair.cluster)
