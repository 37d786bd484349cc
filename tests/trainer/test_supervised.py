"""Supervised fine-tuning on a file: what the assistant says is learnt, and nothing else."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from beside import report_of

from jaxrl.commands.run_commands import write_report
from jaxrl.config.schema import Config, SftConfig
from jaxrl.config.shapes import row_limits
from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params
from jaxrl.models.huggingface.config_json import config_json
from jaxrl.models.huggingface.model_files import write_json
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.batches import pack_examples
from jaxrl.roles.optimizer import OptimConfig, StageOptimConfig
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.tracking.metrics import read_metrics
from jaxrl.tracking.run_folder import RunConfig
from jaxrl.trainer import program
from jaxrl.trainer.context import build_context, supervised_stream
from jaxrl.trainer.findings import fine_tuning
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.run_files import keep_model_files

MODEL = ModelConfig(
    vocab_size=320, num_layers=1, d_model=16, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=8
)
ROWS = [
    {
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "1 and 1?"},
            {"role": "assistant", "content": "It is 2."},
            {"role": "user", "content": "And 3 more?"},
            {"role": "assistant", "content": "That makes 5."},
        ]
    },
    {"prompt": "2 and 2?", "response": "It is 4."},
]
SAID = ["It is 2.", "That makes 5.", "It is 4."]


def make_config(folder, lines: list[str], num_steps: int = 0) -> Config:
    path = folder / "conversations.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return Config(
        name="sft",
        model=MODEL,
        rollout=RolloutConfig(slots=8, prefill_prompts=8),
        train=TrainConfig(rows=2, row_tokens=128),
        sft=SftConfig(
            num_steps=2,
            path=str(path),
            examples_per_step=2,
            optim=StageOptimConfig(lr=1e-2, lr_warmup_steps=0),
        ),
        run=RunConfig(output=str(folder), num_steps=num_steps),
    )


def test_two_steps_from_a_file(tmp_path):
    config = make_config(tmp_path, [json.dumps(row) for row in ROWS])
    assert program.train(config, devices=jax.devices()[:1], report=write_report) == 0
    first, second = read_metrics(config.sft_folder.path / "metrics.jsonl")
    tokenizer = load_tokenizer(config.run_folder.path / "model")
    # Each answer, and that it ends.
    expected = sum(len(tokenizer.encode(text)) + 1 for text in SAID)
    assert first["train/num_trained_tokens"] == second["train/num_trained_tokens"] == expected
    assert expected < 0.5 * first["perf/total_num_tokens"]
    assert second["sft/loss"] < first["sft/loss"] - 0.1
    assert "<svg" in report_of(config.run_folder)


def test_only_what_the_assistant_says_is_in_the_mask(tmp_path):
    config = make_config(tmp_path, [json.dumps(row) for row in ROWS])
    parts = build_context(resolve(config), jax.devices()[:1], kind=fine_tuning(config))
    stream = supervised_stream(
        parts, parts.demonstrations, examples_per_batch=2, max_tokens=config.train.row_tokens
    )
    batch, _ = pack_examples(next(stream), row_limits(config, longest=128).shape(2, minibatches=1))
    inside = batch.tokens[batch.loss_mask > 0]
    answers = np.split(inside, np.flatnonzero(inside == parts.tokenizer.eos_id) + 1)
    assert sorted(parts.tokenizer.decode(answer) for answer in answers if len(answer)) == sorted(
        SAID
    )


@pytest.mark.parametrize(
    ("generation", "stop_ids"), [({"eos_token_id": [5, 1]}, (1, 5)), (None, (1, 6))]
)
def test_the_ends_of_a_model_are_those_of_its_run(tmp_path, generation, stop_ids):
    """Its tokenizer is read from another folder, which was published with another model."""
    tokenizer, weights = train_tokenizer(SAID, vocab_size=300), tmp_path / "weights"
    tokenizer.save(tmp_path / "words")
    write_json(tmp_path / "words" / "generation_config.json", {"eos_token_id": [7, 8]})
    save_checkpoint(init_params(MODEL, jax.random.key(0)), MODEL, weights, dtype="float32")
    write_json(
        weights / "config.json", config_json(MODEL, dtype="float32", base={"eos_token_id": 6})
    )
    if generation:
        write_json(weights / "generation_config.json", generation)
    config = make_config(tmp_path, [json.dumps(row) for row in ROWS])
    read_from = dataclasses.replace(config.tokenizer, path=str(tmp_path / "words"))
    config = dataclasses.replace(config, weights=str(weights), tokenizer=read_from)
    run = build_context(resolve(config), jax.devices()[:1], kind=fine_tuning(config))
    assert run.tokenizer.stop_ids == stop_ids
    keep_model_files(run)
    assert load_tokenizer(config.run_folder.model).stop_ids == stop_ids


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": []}', "conversations.jsonl:2: field 'messages' is []"),
        ('{"prompt": "1 + 1?"}', "conversations.jsonl:2: no field 'response'"),
        ("{", "conversations.jsonl:2: no valid JSON"),
        (
            '{"messages": [{"role": "user", "content": "hello"}]}',
            "the last message of field 'messages' is by 'user'",
        ),
    ],
)
def test_a_broken_row_is_named(line, message, tmp_path):
    config = make_config(tmp_path, [json.dumps(ROWS[0]), line])
    with pytest.raises(UserError) as error:
        program.train(config, devices=jax.devices()[:1], report=write_report)
    assert message in str(error.value)
    assert not config.sft_folder.path.exists()


def test_reinforcement_learning_needs_problems(tmp_path):
    config = make_config(tmp_path, [json.dumps(ROWS[0])], num_steps=1)
    with pytest.raises(UserError, match=r"data\.train names no problems"):
        program.train(config, devices=jax.devices()[:1], report=write_report)


def sharing(config: Config, **changed) -> Config:
    """A config that begins with the SFT stage of the run "sft"."""
    sft = dataclasses.replace(config.sft, run="sft", **changed)
    return dataclasses.replace(config, name="other", sft=sft)


@pytest.fixture(scope="module")
def shared_stage(tmp_path_factory):
    """The config of a run that made an SFT stage, which another has read, and other weights."""
    folder = tmp_path_factory.mktemp("shared")
    config = make_config(folder, [json.dumps(row) for row in ROWS])
    assert program.train(config, devices=jax.devices()[:1], report=write_report) == 0
    before = (config.sft_folder.metrics).read_bytes()
    # What no weight depends on may differ.
    same = dataclasses.replace(sharing(config, save_every=1), optim=OptimConfig(lr=3e-5))
    assert program.train(same, devices=jax.devices()[:1], report=write_report) == 0
    assert config.sft_folder.metrics.read_bytes() == before
    # Other weights of the same shape.
    weights = folder / "weights"
    save_checkpoint(init_params(MODEL, jax.random.key(1)), MODEL, weights, dtype="float32")
    shutil.copytree(config.run_folder.model, weights, dirs_exist_ok=True)
    return config, weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, _: sharing(c, optim=StageOptimConfig(lr=2e-2, lr_warmup_steps=0)),
            "sft.optim.lr: 0.01 -> 0.02",
        ),
        (lambda c, _: sharing(c, num_steps=1), "sft.num_steps: 2 -> 1"),
        (lambda c, _: sharing(c, examples_per_step=1), "sft.examples_per_step: 2 -> 1"),
        (
            lambda c, _: dataclasses.replace(sharing(c), optim=OptimConfig(betas=(0.9, 0.95))),
            "optim.betas",
        ),
        (lambda c, weights: dataclasses.replace(sharing(c), weights=weights), "weights: '' -> "),
    ],
)
def test_a_shared_stage_of_other_settings_is_refused(shared_stage, change, message):
    config, weights = shared_stage
    before = (config.sft_folder.metrics).read_bytes()
    other = change(config, str(weights))
    with pytest.raises(UserError, match=f"made with other settings .*{re.escape(message)}"):
        program.train(other, devices=jax.devices()[:1], report=write_report)
    assert config.sft_folder.metrics.read_bytes() == before
