"""The benchmark beside peers times steps that learn."""

import types

import numpy as np
import pytest
import step_vs_peers as benchmark


def step(number: int, **changes: float) -> dict[str, float]:
    seconds = {"timing_s/gen": 1.0 * number, "timing_s/update_actor": 2.0, "timing_s/step": 4.0}
    learned = {"step": number, "actor/skipped_updates": 0.0, "actor/grad_norm": 0.5}
    return seconds | learned | {"perf/response_num_tokens": 100.0} | changes


def test_the_middle_step_counts():
    found = benchmark.medians([step(1), step(5), step(3)])
    assert found == {"generate_s": 3.0, "train_s": 2.0, "step_s": 4.0, "tokens": 100.0}


@pytest.mark.parametrize(
    "changes",
    [{"actor/skipped_updates": 1.0}, {"actor/grad_norm": 0.0}, {"actor/grad_norm": np.nan}],
)
def test_a_step_without_an_update_ends_it(changes):
    with pytest.raises(SystemExit, match="step 2 had no update"):
        benchmark.medians([step(1), step(2, **changes), step(3)])


def test_every_group_has_a_signal():
    responses = types.SimpleNamespace(texts=[f"{a}{b}" for a in "xyz" for b in range(8)])
    rewards = np.array(benchmark.hashed(responses)).reshape(3, 8)
    assert (np.ptp(rewards, axis=1) > 0.1).all() and (rewards >= 0).all() and (rewards < 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["even", "ragged"])
def test_both_columns_learn(monkeypatch, case):
    """The commands of the benchmark on a small model: updates run, and tuned settings are settings."""
    monkeypatch.setattr(benchmark, "WARM_UP", 1)
    monkeypatch.setattr(benchmark, "TIMED", 1)
    small = {"run.num_steps": 3, "model.num_layers": 1, "model.d_ff": 64, "rollout.num_prompts": 4}
    small |= {"rollout.generation_prompts": 4, "rollout.slots": 32}
    settings = benchmark.SETTINGS | benchmark.CASES[case] | small
    for found in (benchmark.ours(settings), benchmark.ours(settings | benchmark.TUNED[case])):
        assert found["train_s"] > 0.01 and found["tokens"] > 4 * 8 * 5
