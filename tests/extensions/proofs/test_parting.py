"""Where two runs part, by rows and samples written by hand."""

import json
import pathlib

import pytest

from jaxrl.config.command_line import load_config
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.tracking.run_folder import EvaluationFolder, RunFolder, parse_config
from jaxrl_proofs.paired import compared_answers, settings_of
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


def evaluated(
    folder: pathlib.Path, verdicts: list[list[bool]], texts: list[str]
) -> EvaluationFolder:
    """An evaluation with two answers to each prompt, of one token."""
    folder.mkdir()
    rows = [
        pieces(text=[texts[2 * n + i]], rollout_logprob=[-0.5], old_logprob=[])
        | {"prompt_id": n, "sample": i, "correct": right}
        for n, of_prompt in enumerate(verdicts)
        for i, right in enumerate(of_prompt)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["model = 'a'", "weights of rl step 2, 00", "seed = 0"]
    (folder / "results.json").write_text(json.dumps({"settings": settings, "metrics": {}}))
    return EvaluationFolder(folder)


def test_the_difference_of_two_evaluations_is_paired_by_prompt(tmp_path):
    no, yes = False, True
    old = evaluated(tmp_path / "old", [[no, no], [no, yes], [yes, yes], [yes, no]], [*"abcdefgh"])
    new = evaluated(tmp_path / "new", [[no, yes], [no, yes], [yes, yes], [yes, yes]], [*"aBcdefgH"])
    # Means of the prompts 0, .5, 1, .5 and .5, .5, 1, 1. Their differences .5, 0, 0, .5 have a variance of
    # 1/12, so 1.96 standard errors are 1.96 / sqrt(48); apart the variances are 1/6 and 1/12, 1.96 / 4.
    accuracy, equal, first = compared_answers(old, new)
    assert accuracy == (
        "sums: 50.0% -> 75.0%, +25.0% ± 28.3% paired over 4 prompts (± 49.0% if each had prompts of its own)"
    )
    assert equal == "6 of 8 answers are equal, the others part at token 0 (median)"
    assert first.startswith("first: answers: sample 1 of prompt 0, token 0: 'b' (-0.5000) -> 'B'")
    assert list(compared_answers(old, old)) == []
    assert settings_of(old) == {"seed": "0"}


def test_evaluations_of_other_prompts_are_refused(tmp_path):
    old = evaluated(tmp_path / "old", [[True, True]], [*"ab"])
    new = evaluated(tmp_path / "new", [[True, True], [True, True]], [*"abcd"])
    with pytest.raises(UserError, match=r"evaluate both with the same problems and --n$"):
        list(compared_answers(old, new))
