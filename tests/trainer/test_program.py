"""The program as a whole, on a task a two-layer model learns in seconds: repeat a digit."""

import dataclasses
import json
import math
import os
import shutil
import signal

import jax
import pytest
from beside import needs, report_of
from closeness import assert_close
from digits import write_problems
from tiny_runs import problems_in, tiny_config

from jaxrl.commands.run_commands import write_report
from jaxrl.config.config_tree import format_config
from jaxrl.config.schema import Config, SftConfig
from jaxrl.config.shapes import stop_ids_of
from jaxrl.data.data_config import EvaluationSourceConfig, SourceConfig
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.dataflows.algorithm_config import AlgorithmConfig
from jaxrl.dataflows.learning import ActorPhase
from jaxrl.errors import EXIT_TRY_AGAIN, UserError
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.sampling import truncation_of
from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.durable import run_lock
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.tracking.run_weights import export_run
from jaxrl.trainer import program
from jaxrl.trainer.resolved import resolve

ACCURACY = "val-core/repeat/acc/mean@4"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Training and evaluation files."""
    folder = tmp_path_factory.mktemp("problems")
    write_problems(folder)
    return folder


def make_config(folder, problems, *, num_steps=3, **changes) -> Config:
    settings = {
        "name": "tiny",
        "sft.num_steps": 60,
        "sft.examples_per_step": 16,
        "sft.optim.lr": 1e-2,
        "sft.optim.lr_warmup_steps": 5,
        "sft.save_every": 60,
        "evaluation.every": 2,
        "evaluation.num_samples": 4,
        "run.num_steps": num_steps,
        "run.save_every": 1,
        "run.keep_checkpoints": 2,
        "run.rollouts_every": 2,
        # A machine may be busy, and a step that is given up ends this process.
        "run.stop_within_s": 10_000.0,
    }
    config = tiny_config(folder, problems_in(problems), settings)
    return dataclasses.replace(config, **changes)


def one_device():
    return jax.devices()[:1]


def warm(config: Config, whole: Config) -> Config:
    """Gives a run the SFT stage of `whole`, which is the same and need not be trained again."""
    shutil.copytree(
        whole.run_folder.path / "sft", config.run_folder.path / "sft", dirs_exist_ok=True
    )
    return config


def curve(config: Config) -> list[dict]:
    rows = read_metrics(config.run_folder.path / "rl" / "metrics.jsonl")
    return [without_timings(row) for row in rows]


def rollouts(config: Config) -> dict[int, bytes]:
    files = config.run_folder.rollouts.steps()
    return {step: path.read_bytes() for step, path in files.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, problems):
    """A run from start to end, never interrupted."""
    config = make_config(tmp_path_factory.mktemp("whole"), problems, num_steps=4)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    return config


def test_a_run_leaves_its_record(whole):
    rows = curve(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    evaluated = [row["step"] for row in rows if ACCURACY in row]
    assert evaluated == [0, 2, 4]
    last = rows[-1]
    for name in (
        "actor/entropy",
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/grad_norm",
        "actor/lr",
        "critic/rewards/mean",
        "critic/score/mean",
        "response_length/mean",
        "train/num_gen_batches",
        "training/rollout_probs_diff_max",
    ):
        assert math.isfinite(last[name]), name
    # The sampler and the trainer are one model: their probabilities agree to rounding.
    assert last["training/rollout_probs_diff_max"] < 1e-4
    assert last["actor/first_ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert list((whole.run_folder.path / "rl" / "tensorboard").iterdir())
    page = report_of(whole.run_folder)
    assert "Answer:" in page and "<svg" in page
    assert "evaluation accuracy before training" in page
    assert "evaluation accuracy after step 4 (± standard error)<" in page


@pytest.mark.long
def test_prompts_need_no_truth_where_only_functions_score(tmp_path, problems, whole, capsys):
    rows = [{"problem": f"{n} repeat"} for n in range(100, 140)]
    rows[:4] = [
        row | {"answer": answer} for row, answer in zip(rows, ["5", "", None, [[1]]], strict=False)
    ]
    (tmp_path / "asks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def odd(responses):\n"
        "    assert set(responses.answers) <= {'', '5'}\n"
        "    return [int(tokens.sum()) % 7 for tokens in responses.tokens]\n"
    )
    odd = {"odd": {"path": f"{tmp_path / 'rewards.py'}:odd", "weight": 1.0}}
    train = SourceConfig(source="asks", path=str(tmp_path / "asks.jsonl"))
    settings = {
        "data": dataclasses.replace(whole.data, train=train),
        "sft": SftConfig(),
        "algorithm": AlgorithmConfig(dataflow="grpo"),
        "rollout": dataclasses.replace(whole.rollout, keep_groups="score"),
        "reward": dataclasses.replace(whole.reward, functions=odd, grader_weight=0.0),
    }
    config = make_config(tmp_path, problems, num_steps=1, **settings)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    assert "39 prompts without a truth" in capsys.readouterr().out
    # Nor has a run without an SFT stage a folder of it.
    assert not (config.run_folder.path / "sft").exists()
    step = curve(config)[-1]
    assert step["reward/odd/mean"] > 0 and step["reward/grader/failed"] == 0
    # What is evaluated with has truths.
    assert ACCURACY in step
    # Where a grader's verdict counts, there have to be some.
    (tmp_path / "asks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
    settings["reward"] = dataclasses.replace(settings["reward"], grader_weight=1.0)
    config = make_config(tmp_path / "graded", problems, num_steps=1, **settings)
    with pytest.raises(UserError, match=r"Set fields\.answer .*reward\.grader_weight=0"):
        program.train(config, devices=one_device(), report=write_report)


@pytest.mark.long
def test_a_longer_run_goes_on_to_the_same_curve_and_evaluates_each_last_step_once(
    tmp_path, problems, whole
):
    config = warm(make_config(tmp_path, problems, num_steps=3), whole)
    program.train(config, devices=one_device(), report=write_report)
    evaluated = [row["step"] for row in curve(config) if ACCURACY in row]
    assert evaluated == [0, 2, 3]
    last = "evaluation accuracy after step 3 (± standard error)<"
    assert last in report_of(config.run_folder)
    config = make_config(tmp_path, problems, num_steps=4)
    program.train(config, devices=one_device(), report=write_report)
    rows = curve(config)
    rows[3] = {name: value for name, value in rows[3].items() if not name.startswith("val-")}
    assert rows == curve(whole)
    assert rollouts(config) == rollouts(whole)


def test_damaged_newest_checkpoint_is_skipped(tmp_path, problems, whole, caplog):
    config = make_config(tmp_path, problems, num_steps=4)
    shutil.copytree(whole.run_folder.path, config.run_folder.path)
    newest = config.run_folder.path / "rl" / "checkpoints" / "4"
    largest = max(newest.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    program.train(config, devices=one_device(), report=write_report)
    assert "checkpoint of step 4 skipped" in caplog.text
    assert curve(config) == curve(whole)
    assert rollouts(config) == rollouts(whole)


@pytest.mark.long
def test_signal_saves_and_the_next_run_goes_on(tmp_path, problems, whole, monkeypatch):
    config = make_config(
        tmp_path,
        problems,
        num_steps=4,
        run=dataclasses.replace(whole.run, output=str(tmp_path), save_every=100),
    )
    warm(config, whole)
    update = ActorPhase.update

    def signal_then_update(phase, experience):
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(experience)
        return update(phase, experience)

    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(ActorPhase, "update", signal_then_update)
        ended = program.train(config, devices=one_device(), report=write_report)
    assert ended == EXIT_TRY_AGAIN
    assert curve(config)[-1]["step"] == 2
    assert "<svg" in report_of(config.run_folder)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    assert curve(config) == curve(whole)


def test_finished_run_is_left_alone(whole):
    before = curve(whole)
    assert program.train(whole, devices=one_device(), report=write_report) == 0
    assert curve(whole) == before


def test_a_run_from_weights_keeps_and_shows_their_shape(tmp_path, problems, whole, caplog):
    export_run(whole.run_folder.path, tmp_path / "hf", dtype="float32", max_shard_bytes=10**9)
    config = make_config(tmp_path, problems, model=ModelConfig(), weights=str(tmp_path / "hf"))
    config = dataclasses.replace(
        config,
        sft=dataclasses.replace(config.sft, num_steps=2),
        run=dataclasses.replace(config.run, num_steps=0),
    )
    for _ in range(2):
        assert program.train(config, devices=one_device(), report=write_report) == 0
        kept = config.run_folder.config.read_text().splitlines()
        assert {"model.num_layers = 2", "model.d_model = 32", "model.vocab_size = 288"} < set(kept)
        assert "model.d_model = 32" in report_of(config.run_folder)
    assert "other settings" not in caplog.text


@pytest.mark.long
def test_eight_devices_sample_the_same_tokens(tmp_path, problems, whole):
    """Training 1-4-2, generation 1-2-2-2. Losses to rounding; tokens equal while weights are."""
    config = make_config(
        tmp_path,
        problems,
        num_steps=1,
        mesh=LayoutConfig(train="1-4-2", generate="1-2-2-2", fsdp=2),
    )
    program.train(warm(config, whole))
    one, eight = curve(whole), curve(config)
    for name in (ACCURACY, "val-aux/repeat/response_length/mean"):
        assert eight[0][name] == one[0][name]
    for name in ("train/accuracy", "response_length/mean", "critic/rewards/mean"):
        assert eight[1][name] == one[1][name]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert_close(eight[1][name], one[1][name], rtol=2e-3, scale=0.005, err_msg=name)


def test_a_first_sft_stage_without_steps_is_refused():
    with pytest.raises(ValueError, match="names an SFT stage to begin with, and num_steps 0"):
        SftConfig(run="other", num_steps=0)


def test_batch_that_does_not_divide(tmp_path, problems):
    config = make_config(
        tmp_path,
        problems,
        mesh=LayoutConfig(train="1-1-8"),
        train=TrainConfig(rows=12, row_tokens=48),
    )
    with pytest.raises(
        UserError, match=r"train\.rows=12 does not divide over data=8 .* use 8 or 16"
    ):
        program.train(config)


def test_data_that_teaches_nothing_ends_with_a_clear_error(tmp_path, problems):
    config = make_config(tmp_path, problems, sft=SftConfig(num_steps=0))
    with pytest.raises(
        UserError, match=r"10 generation batches .* gave 0 of the 8 groups.*What was sampled is in"
    ):
        program.train(config, devices=one_device(), report=write_report)
    rows = list(map(json.loads, config.run_folder.rollouts.step(1).read_text().splitlines()))
    assert rows and all(row["step"] == 1 and "completion" in row for row in rows)


def test_run_that_may_not_resume(whole):
    config = dataclasses.replace(whole, run=dataclasses.replace(whole.run, resume="never"))
    with pytest.raises(UserError, match="already holds a run"):
        program.train(config, devices=one_device(), report=write_report)


@pytest.mark.parametrize("content", ["[", '[{"prompt": "1"}]'])
def test_a_damaged_file_of_samples_costs_the_report_its_answers(content, tmp_path, problems, whole):
    config = make_config(tmp_path, problems, num_steps=4)
    shutil.copytree(whole.run_folder.path, config.run_folder.path)
    config.run_folder.samples("before").write_text(content)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    assert "<svg" in report_of(config.run_folder)


def test_a_refused_resume_leaves_the_folder_as_it_was(tmp_path, problems, whole):
    config = make_config(tmp_path, problems, num_steps=5)
    shutil.copytree(whole.run_folder.path, config.run_folder.path)
    (config.run_folder.path / "lock").unlink()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    wide = dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=96))
    for resume, told in {
        "auto": r"made with other settings \(model\.d_ff: 64 -> 96\)",
        "accept_other_settings": r"does not fit the model of this config \(actor: .*64",
    }.items():
        wide = dataclasses.replace(wide, run=dataclasses.replace(wide.run, resume=resume))
        with pytest.raises(UserError, match=told):
            program.train(wide, devices=one_device(), report=write_report)
        (config.run_folder.path / "lock").unlink()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    export_run(config.run_folder.path, tmp_path / "hf", dtype="float32", max_shard_bytes=10**9)


@pytest.mark.parametrize(
    ("stage", "num_steps"), [("rl", 4), ("sft", 5)], ids=["finished", "to go on"]
)
def test_a_run_that_has_lost_rows_is_refused_and_left_as_it_was(
    stage, num_steps, tmp_path, problems, whole
):
    # Other settings, so that a config.txt that is written again can be told.
    config = make_config(tmp_path, problems, num_steps=num_steps, optim=OptimConfig(lr=2e-3))
    shutil.copytree(whole.run_folder.path, config.run_folder.path)
    log = config.run_folder.path / stage / "metrics.jsonl"
    rows = log.read_bytes().splitlines(keepends=True)
    changed = [rows[0], rows[1].replace(b": 0.", b": 8.", 1), *rows[2:]]
    for damaged in (None, rows[:-1], changed):
        log.unlink(missing_ok=True)
        if damaged is not None:
            log.write_bytes(b"".join(damaged))
        (config.run_folder.path / "lock").unlink()
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(
            UserError, match=r"metrics\.jsonl .*go on without the lost rows"
        ) as error:
            program.train(config, devices=one_device(), report=write_report)
        assert f"/{stage}/" in str(error.value)
        (config.run_folder.path / "lock").unlink()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        (config.run_folder.path / "lock").touch()


def test_lost_rows_can_be_accepted(tmp_path, problems, whole, caplog):
    config = make_config(tmp_path, problems, num_steps=4)
    shutil.copytree(whole.run_folder.path, config.run_folder.path)
    for name in ("rl", "sft"):
        log = config.run_folder.path / name / "metrics.jsonl"
        lines = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join([*lines[:1], b"?\n", *lines[3:]]))
    accepting = dataclasses.replace(config.run, resume="accept_lost_rows")
    # A finished run has its report written again from what is left.
    config = dataclasses.replace(config, run=accepting)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    assert "sft/metrics.jsonl has other content than" in caplog.text
    assert "<svg" in report_of(config.run_folder)


def test_a_second_run_in_the_folder_is_refused(whole):
    rows = curve(whole)
    with run_lock(whole.run_folder.path), pytest.raises(UserError, match="is in use by process"):
        program.train(whole, devices=one_device(), report=write_report)
    assert curve(whole) == rows


def test_a_shared_sft_stage_is_trained_by_one_and_read_by_all(tmp_path, problems, whole, capsys):
    """And without problems to evaluate with, a run says so."""
    options = dataclasses.replace(whole.sft, run="first")
    data = dataclasses.replace(whole.data, evaluation=EvaluationSourceConfig())
    config = make_config(tmp_path, problems, num_steps=1, sft=options, data=data)
    first = dataclasses.replace(config, name="first")
    with (
        run_lock(first.run_folder.path),
        pytest.raises(UserError, match="first/seed0 is in use by process"),
    ):
        program.train(config, devices=one_device(), report=write_report)
    shutil.copytree(whole.run_folder.path / "sft", first.run_folder.path / "sft")
    with run_lock(first.run_folder.path):
        assert program.train(config, devices=one_device(), report=write_report) == 0
    # The row of step 0 tells of an evaluation alone.
    assert curve(config) == curve(whole)[1:2]
    said = "data.evaluation names no problems, so there is no accuracy"
    assert f"evaluation: none: {said}" in capsys.readouterr().out
    assert said in report_of(config.run_folder)


REWARDS = """
import os, signal, time

def hangs(responses):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
"""


def rewarded(folder, problems, whole, function, **changes) -> Config:
    (folder / "rewards.py").write_text(REWARDS)
    functions = {"own": {"path": f"{folder}/rewards.py:{function}", "weight": 0.0}}
    config = make_config(
        folder,
        problems,
        num_steps=4,
        reward=dataclasses.replace(whole.reward, functions=functions),
        run=dataclasses.replace(whole.run, output=str(folder), save_every=100),
        **changes,
    )
    return warm(config, whole)


@pytest.mark.slow
def test_a_learning_rate_that_is_far_too_high_leaves_a_checkpoint_from_before(
    tmp_path, problems, whole, capfd
):
    config = make_config(
        tmp_path,
        problems,
        num_steps=4,
        algorithm=AlgorithmConfig(dataflow="grpo", updates_per_step=1),
        # Weights that diverge in their first update, and finite.
        optim=OptimConfig(lr=3.0, lr_warmup_steps=0),
        run=dataclasses.replace(whole.run, output=str(tmp_path), num_steps=4, keep_checkpoints=1),
    )
    assert program.train(warm(config, whole), devices=one_device(), report=write_report) == 0
    assert "the model may have diverged" in capfd.readouterr().out
    checkpoints = StoredCheckpoints(config.run_folder.path / "rl" / "checkpoints")
    assert checkpoints.steps == [0, 4]


def test_a_signal_ends_a_reward_that_hangs(tmp_path, problems, whole):
    config = rewarded(tmp_path, problems, whole, "hangs")
    assert program.train(config, devices=one_device(), report=write_report) == EXIT_TRY_AGAIN
    assert [row["step"] for row in curve(config)] == [0]


# Generation across steps


def partial_config(folder, problems, whole, *, num_steps, **changes) -> Config:
    rollout = dataclasses.replace(whole.rollout, **{"max_staleness": 8} | changes)
    config = make_config(folder, problems, rollout=rollout, num_steps=num_steps)
    return warm(config, whole)


# With few prompts per step and one token per dispatch the longest samples take more than two steps.
MANY_STEPS = {
    "num_prompts": 4,
    "tokens_per_dispatch": 1,
    "max_staleness": 1,
    "temperature": 1.5,
    "max_response_tokens": 24,
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"slots": 16}, MANY_STEPS], ids=["few slots", "many steps"])
def test_unfinished_samples_go_on_in_the_next_step_and_through_a_checkpoint(
    tmp_path, problems, whole, changes
):
    def train(folder, *, num_steps):
        config = partial_config(tmp_path / folder, problems, whole, num_steps=num_steps, **changes)
        program.train(config, devices=one_device(), report=write_report)
        return config

    config = train("whole", num_steps=4)
    rows = curve(config)[1:]
    assert rows[0]["rollout/unfinished_groups"] == rows[0]["rollout/stale_tokens"] == 0
    assert any(row["rollout/unfinished_groups"] > 0 for row in rows)
    assert any(row["rollout/stale_tokens"] > 0 for row in rows)
    dropped = any(row["rollout/dropped_stale_groups"] > 0 for row in rows)
    assert dropped == ("max_staleness" in changes)
    train("again", num_steps=2)
    again = train("again", num_steps=4)
    assert curve(again) == curve(config) and rollouts(again) == rollouts(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"max_staleness": 8, "driver": "jetstream"},
            "'jetstream' cannot do rollout.max_staleness",
        ),
        ({"stop_ids": (5, 4000)}, r"rollout.stop_ids 4000: .* from 0 to 268"),
        ({"stop_strings": ("ok", "<eos>\n")}, r"no answer's text has .*; use '<eos>' alone"),
    ],
)
def test_sampling_that_cannot_be(changes, message, tmp_path, problems, whole):
    rollout = dataclasses.replace(whole.rollout, **changes)
    with pytest.raises(UserError, match=message):
        program.train(
            make_config(tmp_path, problems, rollout=rollout),
            devices=one_device(),
            report=write_report,
        )


def test_a_stop_string_that_is_a_special_token_is_a_stop_id_of_a_run():
    tokenizer = train_tokenizer(["."], vocab_size=260)
    rollout = RolloutConfig(stop_strings=("<pad>", ".", "<eos>"), stop_ids=(5,))
    assert stop_ids_of(rollout, tokenizer) == (1, 5, 0)


def test_partial_rollouts_want_a_buffer(tmp_path, problems, whole):
    rollout = dataclasses.replace(whole.rollout, max_staleness=8)
    algorithm = dataclasses.replace(whole.algorithm, dataflow="grpo")
    config = make_config(tmp_path, problems, rollout=rollout, algorithm=algorithm)
    with pytest.raises(UserError, match=r"dataflow 'grpo' takes what it gets; use dataflow dapo"):
        program.train(config, devices=one_device(), report=write_report)


@pytest.fixture(scope="module")
def limited(tmp_path_factory, problems, whole):
    """A run that samples with top_p."""
    config = make_config(tmp_path_factory.mktemp("limited"), problems, num_steps=2)
    rollout = dataclasses.replace(
        config.rollout, top_p=0.9, temperature=1.5, max_generation_batches=2, on_shortage="fill"
    )
    config = dataclasses.replace(config, rollout=rollout)
    assert config.truncates_logprobs
    assert program.train(warm(config, whole), devices=one_device(), report=write_report) == 0
    return config


@pytest.mark.long
def test_a_run_with_top_p_trains_the_policy_that_sampled(limited):
    for row in curve(limited)[1:]:
        assert 0 <= row["rollout_corr/truncation_masked_fraction"] < 1e-3
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert abs(row["rollout_corr/kl"]) < 1e-5
        assert row["actor/first_ratio_max_deviation"] == 0
        assert row.get("training/same_token_fraction", 1) == 1
        assert math.isfinite(row["actor/grad_norm"])


def test_limits_of_evaluation_change_no_training(whole):
    limited = dataclasses.replace(whole.evaluation, top_p=0.7)
    config = dataclasses.replace(whole, evaluation=limited)
    assert not config.truncates_logprobs
    assert resolve(config).objective.correction is None
    # Nor does training change what evaluations record.
    rollout = dataclasses.replace(whole.rollout, top_k=3)
    training = rollout.sampling(0, renormalized=True)
    assert training.truncation.renormalized
    assert not limited.sampling(training, step=0).truncation.renormalized
    # Its own limits, whatever those of training are.
    for top_k in (0, 20):
        options = dataclasses.replace(limited, top_k=top_k).sampling(training, step=0)
        assert options.truncation == truncation_of(top_k=top_k, top_p=0.7)


@pytest.mark.long
def test_a_run_without_evaluations_saves_its_last_step_alone(tmp_path, problems, whole):
    config = make_config(tmp_path, problems, num_steps=2)
    config = dataclasses.replace(
        config,
        evaluation=dataclasses.replace(config.evaluation, every=0),
        run=dataclasses.replace(config.run, save_every=0),
    )
    assert program.train(warm(config, whole), devices=one_device(), report=write_report) == 0
    # Evaluations change no training.
    assert curve(config) == [
        {name: value for name, value in row.items() if not name.startswith("val-")}
        for row in curve(whole)[1:3]
    ]


def test_a_run_keeps_samples_to_look_at(whole):
    files = rollouts(whole)
    assert list(files) == [1, 2, 4]
    rows = [json.loads(line) for line in files[4].splitlines()]
    assert len(rows) == 8 * 4 and {row["step"] for row in rows} == {4}
    for row in rows:
        pieces = row["token_pieces"]
        assert len(pieces["text"]) == len(pieces["old_logprob"]) == row["length"]
        assert "".join(pieces["text"]).removesuffix("<eos>") == row["completion"]
        # In float32 the sampler and the trainer agree.
        for ours, theirs in zip(pieces["rollout_logprob"], pieces["old_logprob"], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-3)


# A full disk


@needs("report")
def test_files_of_the_run_and_its_report(disk, problems, whole):
    """A finished run writes its report again, and then its settings."""
    disk.resize(10**8)
    config = make_config(disk.path, problems, num_steps=4)
    shutil.copytree(whole.run_folder.path, config.run_folder.path)
    report = config.run_folder.report.read_bytes()
    (config.run_folder.path / "lock").unlink()
    disk.leave(0)
    with pytest.raises(UserError, match=r"(lock|seed0).* \(No space left on device\)"):
        program.train(config, devices=one_device(), report=write_report)
    disk.leave(8192)
    with pytest.raises(UserError, match=r"report\.html could not .* \(No space left on device\)"):
        program.train(config, devices=one_device(), report=write_report)
    assert config.run_folder.report.read_bytes() == report
    # Where a run is new its settings come first.
    fresh = dataclasses.replace(config, name="fresh")
    with pytest.raises(UserError, match=r"No space left on device"):
        program.train(fresh, devices=one_device(), report=write_report)
    disk.resize(10**8)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    assert config.run_folder.config.read_text().startswith(format_config(config))
    assert curve(config) == curve(whole)
