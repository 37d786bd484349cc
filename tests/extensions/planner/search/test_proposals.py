"""What the search proposes runs: random recipes and topologies, at trace depth."""

import dataclasses
import math

import pytest
from proposals import Pair, check_devices, proposal, random_pair
from slow_values import mostly_slow

from jaxrl_planner.search.mapping_choice import propose
from jaxrl_planner.simulation.kernel_times import TABLES

# 131 has ZeRO-1, and 263 rows that are mostly empty.
FAST = (2, 131, 263)


def with_pages(pair: Pair) -> Pair:
    return dataclasses.replace(pair, overrides=pair.overrides | {"rollout.cache": "paged"})


@pytest.mark.long
@pytest.mark.parametrize("seed", mostly_slow(FAST, fast=(2,)))
def test_a_proposal_with_pages_runs(seed, tmp_path):
    assert proposal(with_pages(random_pair(seed)), tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 20))
def test_five_hundred_proposals_run(first, tmp_path):
    """The first 200 for any cluster, 60 with pages, and 200 for several hosts."""
    pairs = [
        random_pair(seed, least_hosts=2 if first >= 300 else 1) for seed in range(first, first + 20)
    ]
    pairs = [with_pages(pair) if 200 <= first < 260 else pair for pair in pairs]
    refused = [proposal(pair, tmp_path) for pair in pairs]
    # Models that do not fit are the only reason to propose nothing.
    assert sum(map(bool, refused)) <= 8, refused


@pytest.mark.long
def test_a_run_has_the_rows_that_were_simulated_and_its_pools_on_every_host(monkeypatch):
    # Without costs of small kernels this case has two pools, of different rows.
    for platform in list(TABLES):
        monkeypatch.delitem(TABLES, platform)
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
