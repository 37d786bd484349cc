"""Reward models, cost models and DPO as programs: they learn, leave what others can use, and go on."""

import dataclasses
import json
import shutil

import jax
import pytest
from beside import report_of

from jaxrl.commands.run_commands import write_report
from jaxrl.config.schema import Config, EvaluationConfig, PreferenceConfig
from jaxrl.data.data_config import DataConfig, SourceConfig
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.reward_config import RewardConfig
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_folder import RunConfig
from jaxrl.trainer import program

MODEL = ModelConfig(
    vocab_size=288, num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Problems, and pairs of which the chosen answer is the longer one."""
    folder = tmp_path_factory.mktemp("files")
    for name, numbers in (("train", range(100, 200)), ("evaluation", range(200, 224))):
        problems = [{"problem": f"{n} say", "answer": n % 10} for n in numbers]
        pairs = [
            {
                "prompt": f"{n} say",
                "chosen": "yes yes",
                "rejected": "no",
                "chosen_harms": False,
                "rejected_harms": True,
            }
            for n in numbers
        ]
        for kind, rows in (("problems", problems), ("pairs", pairs)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}_{kind}.jsonl").write_text(text)
    return folder


def make_config(files, output, num_steps: int = 12, **preference) -> Config:
    source = SourceConfig(source="say", path=str(files / "train_problems.jsonl"))
    evaluation = dataclasses.replace(source, path=str(files / "evaluation_problems.jsonl"))
    settings = {
        "path": str(files / "train_pairs.jsonl"),
        "evaluation_path": str(files / "evaluation_pairs.jsonl"),
        "pairs_per_step": 8,
        "loss": "bradley_terry",
        **preference,
    }
    return Config(
        name="pairs",
        model=MODEL,
        data=DataConfig(train=source, evaluation=evaluation, max_prompt_tokens=16),
        rollout=RolloutConfig(max_response_tokens=8, slots=8, prefill_prompts=8),
        reward=RewardConfig(overlong_buffer_tokens=0),
        train=TrainConfig(rows=4, row_tokens=64),
        preference=PreferenceConfig(**settings),
        optim=OptimConfig(lr=1e-2, lr_warmup_steps=0),
        evaluation=EvaluationConfig(every=6),
        run=RunConfig(output=str(output), num_steps=num_steps, save_every=4),
    )


def rows_of(config: Config) -> list[dict]:
    return read_metrics(config.run_folder.path / "preference" / "metrics.jsonl")


def one_device():
    return jax.devices()[:1]


@pytest.mark.long
def test_pairs_to_evaluate_with_are_not_needed(files, tmp_path):
    path = "shared/worked_sums.py:right_or_wrong"
    config = make_config(files, tmp_path, num_steps=2, path=path, evaluation_path="")
    train = SourceConfig(path="shared/worked_sums.py:make", size=40)
    config = dataclasses.replace(
        config,
        data=DataConfig(train=train, max_prompt_tokens=16),
        train=TrainConfig(rows=4, row_tokens=512),
    )
    assert program.train(config, devices=one_device(), report=write_report) == 0
    rows = rows_of(config)
    assert [row["step"] for row in rows] == [1, 2]
    assert not any("accuracy" in name for name in rows[-1] if name.startswith("val-"))


def test_a_reward_model_is_trained_and_left_for_others(files, tmp_path):
    config = make_config(files, tmp_path)
    assert program.train(config, devices=one_device(), report=write_report) == 0
    rows = rows_of(config)
    assert rows[0]["val-core/pairs/accuracy"] == 0.5
    assert rows[-1]["val-core/pairs/accuracy"] == 1.0
    assert rows[-1]["pairs/loss"] < 0.5 * rows[1]["pairs/loss"]
    stored = read_config(config.run_folder.trained_model)
    assert stored.num_scores == 1 and stored.num_layers == MODEL.num_layers
    assert (config.run_folder.trained_model / "tokenizer.json").exists()
    assert "<svg" in report_of(config.run_folder)


@pytest.mark.slow
def test_a_stopped_one_goes_on_to_the_same_curve(files, tmp_path):
    cost = {"loss": "cost_preference"}
    whole = make_config(files, tmp_path / "whole", **cost)
    program.train(whole, devices=one_device(), report=write_report)
    assert rows_of(whole)[-1]["val-core/pairs/accuracy"] == 1.0
    assert rows_of(whole)[-1]["pairs/sign_accuracy"] == 1.0
    half = make_config(files, tmp_path / "half", **cost, **{"num_steps": 8})
    program.train(half, devices=one_device(), report=write_report)
    shutil.rmtree(half.run_folder.trained_model)
    rest = make_config(files, tmp_path / "half", **cost)
    program.train(rest, devices=one_device(), report=write_report)
    for ours, theirs in zip(rows_of(rest)[-4:], rows_of(whole)[-4:], strict=True):
        assert ours["pairs/loss"] == theirs["pairs/loss"]


@pytest.mark.slow
def test_dpo_on_eight_devices(files, tmp_path):
    config = make_config(files, tmp_path, loss="dpo", options={"beta": 0.1})
    config = dataclasses.replace(
        config, mesh=dataclasses.replace(config.mesh, train="1-2-4", fsdp=2)
    )
    assert program.train(config, report=write_report) == 0
    rows = rows_of(config)
    assert rows[0]["val-core/pairs/accuracy"] == 0.5
    assert rows[-1]["val-core/pairs/accuracy"] == 1.0
    assert rows[-1]["pairs/reward_margin"] > 0.1
