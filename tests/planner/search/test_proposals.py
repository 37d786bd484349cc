"""What the search proposes runs: random recipes and topologies, at trace depth."""

import dataclasses
import math

import pytest
from proposals import Pair, proposal, random_pair

from jaxrl.planner.hardware.cluster import Cluster
from jaxrl.planner.search.mapping_choice import propose, search_for

# 131 has ZeRO-1, 148 stages of one layer, and 263 rows that are mostly empty.
FAST = (0, 2, 3, 131, 148, 263)


@pytest.mark.parametrize("seed", FAST)
def test_a_proposal_runs(seed, tmp_path):
    assert proposal(random_pair(seed), tmp_path) == ""


def with_pages(pair: Pair) -> Pair:
    return dataclasses.replace(pair, overrides=pair.overrides | {"rollout.cache": "paged"})


@pytest.mark.parametrize("seed", FAST)
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


def test_a_run_has_the_rows_that_were_simulated():
    # The fastest mapping has different numbers of rows, so the search is repeated with common ones. It then
    # finds a mapping whose roles would do with fewer, and which is slower with these.
    pair = Pair("safe_rlhf_tiny", {"train.rows": "1"}, "v4:4x4x4")
    found = search_for(pair.config, Cluster.parse(pair.topology))
    parts = {role.strategy.row_parts for role in found.roles.values()}
    assert found.common_rows > math.lcm(*parts)
    _, proposed = propose(pair.config, Cluster.parse(pair.topology))
    assert proposed.train.rows == found.common_rows
    assert all(proposed.train.rows % part == 0 for part in parts)
