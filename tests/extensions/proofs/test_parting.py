"""Where two runs part, by rows and samples written by hand."""

import json
import pathlib

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.tracking.run_folder import RunFolder, parse_config
from jaxrl_proofs.parting import compared
from jaxrl_proofs.stored_run import StoredRun, config_of

RECIPES = sorted((pathlib.Path(__file__).parents[3] / "configs").glob("*.py"))

ROW = {
    "step": 1,
    "time_s": 5.0,
    "prompt_length/mean": 4.0,
    "response_length/mean": 2.0,
    "critic/score/mean": 0.5,
    "training/rollout_probs_diff_max": 1e-7,
    "actor/loss": 0.25,
    "timing_s/gen": 3.0,
}
SAMPLE = {
    "step": 1,
    "source": "sums",
    "prompt_id": 7,
    "problem_key": "ab",
    "sample": 0,
    "prompt": "1 + 1",
    "answer": "2",
    "correct": True,
    "score": 1.0,
    "token_pieces": {
        "text": ["2", "!"],
        "rollout_logprob": [-0.5, -0.1],
        "old_logprob": [-0.5, -0.1],
    },
}


def stored(folder: pathlib.Path, row: dict, sample: dict, *, settings="seed = 0\n") -> StoredRun:
    run = RunFolder(folder)
    run.rl.path.mkdir(parents=True)
    run.rollouts.path.mkdir()
    run.config.write_text(settings)
    run.rl.metrics.write_text(json.dumps(row) + "\n")
    run.rollouts.step(1).write_text(json.dumps(sample) + "\n")
    return StoredRun(run)


def pieces(**changes) -> dict:
    return SAMPLE | {"token_pieces": SAMPLE["token_pieces"] | changes}


def test_clocks_do_not_part_two_runs(tmp_path):
    other = ROW | {"time_s": 6.0, "timing_s/gen": 4.0, "actor/only_here": 1.0}
    found = compared(stored(tmp_path / "a", ROW, SAMPLE), stored(tmp_path / "b", other, SAMPLE))
    # The step's number and five metrics.
    assert (found.steps, found.numbers, found.tokens, found.parting) == (1, 6, 2, None)


@pytest.mark.parametrize(
    ("row", "sample", "where", "says", "by_rounding"),
    [
        ({"prompt_length/mean": 5.0}, SAMPLE, "prompts", "prompt_length/mean 4 -> 5", False),
        ({}, SAMPLE | {"prompt_id": 8}, "prompts", "sample 0 is of another problem", False),
        ({}, SAMPLE | {"prompt": "1 + 2"}, "prompts", "1 + 1 -> 1 + 2", False),
        (
            {"response_length/mean": 3.0, "actor/loss": 0.5},
            pieces(text=["2", "?"], rollout_logprob=[-0.5, -2.0]),
            "answers",
            "token 1: '!' (-0.1000) -> '?' (-2.0000); log-probabilities before it are equal",
            False,
        ),
        (
            {},
            pieces(text=["2"], rollout_logprob=[-0.25]),
            "answers",
            "token 1: '!' (-0.1000) -> the end; log-probabilities before it are up to 0.25 apart",
            False,
        ),
        ({}, SAMPLE | {"score": 0.0}, "verdicts", "score: 1.0 -> 0.0", False),
        ({"critic/score/mean": 0.0}, SAMPLE, "verdicts", "critic/score/mean 0.5 -> 0", False),
        (
            {"actor/loss": 0.25001},
            pieces(rollout_logprob=[-0.5, -0.1003]),
            "log-probabilities",
            "up to 0.0003 apart under the sampler",
            True,
        ),
        (
            {},
            pieces(old_logprob=[-0.5, -0.3]),
            "log-probabilities",
            "0.2 apart under the tr",
            False,
        ),
        ({"actor/loss": 0.5}, SAMPLE, "update", "actor/loss 0.25 -> 0.5; 1 of 6", False),
        ({"actor/loss": float("nan")}, SAMPLE, "update", "actor/loss 0.25 -> nan", False),
    ],
)
def test_the_first_difference_in_the_flow_of_a_step_is_named(
    tmp_path, row, sample, where, says, by_rounding
):
    other = stored(tmp_path / "b", ROW | row, sample)
    parting = compared(stored(tmp_path / "a", ROW, SAMPLE), other).parting
    assert parting is not None
    assert (parting.stage, parting.step, parting.where) == ("rl", 1, where)
    assert says in "\n".join(parting.lines)
    assert parting.by_rounding == by_rounding


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_config_of_a_run_is_read_back_from_its_folder(recipe):
    config = load_config(Config, str(recipe), {})
    assert config_of(parse_config(format_config(config)), origin="here") == config


def test_settings_that_cannot_be_read_are_named():
    with pytest.raises(UserError, match=r"^f: seed = \[ cannot be read; restore the file"):
        config_of({"seed": "["}, origin="f")
    with pytest.raises(UserError, match=r"^f: .*no_such_setting.*version of jaxrl that made"):
        config_of({"no_such_setting": "1"}, origin="f")
