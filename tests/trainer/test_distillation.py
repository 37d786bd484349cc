"""On-policy distillation: a student approaches a frozen teacher of another size, and no reward is needed."""

import json

import jax
import numpy as np
import pytest
from tiny_runs import shape_of, tiny_config

from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params, score_config
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.models.model_config import ModelConfig
from jaxrl.tracking.metrics import read_metrics
from jaxrl.trainer import program

STUDENT = ModelConfig(
    vocab_size=288, num_layers=1, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
)
TEACHER = ModelConfig(
    vocab_size=288, num_layers=2, d_model=48, d_ff=96, num_heads=6, num_kv_heads=3, head_dim=8
)


def save_model(model: ModelConfig, directory, *, sharper: float = 1.0) -> None:
    """Random weights, whose last norm scales the logits."""
    params = init_params(model, jax.random.key(7))
    params["final_norm"] = jax.tree.map(lambda x: x * sharper, params["final_norm"])
    save_checkpoint(params, model, directory, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts without answers, and teachers that prefer some tokens by far."""
    folder = tmp_path_factory.mktemp("distillation")
    rows = ({"problem": f"{n} say {n * 7 % 10}"} for n in range(100, 400))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = ({"problem": f"{n} say", "answer": str(n % 7)} for n in range(100, 400))
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(TEACHER, folder / "teacher", sharper=2.0)
    save_model(score_config(TEACHER), folder / "scores")
    small = ModelConfig(
        vocab_size=64, num_layers=1, d_model=16, d_ff=32, num_heads=2, num_kv_heads=1, head_dim=8
    )
    save_model(small, folder / "few_tokens")
    save_model(TEACHER, folder / "other_tokens")
    train_tokenizer(["yes we can"], vocab_size=288).save(folder / "other_tokens")
    return folder


def make_config(folder, output, **changes) -> Config:
    settings = {
        "data.train.path": str(folder / "train.jsonl"),
        "teacher.weights": str(folder / "teacher"),
        "rollout.num_prompts": 16,
        "reward.grader_weight": 0.0,
        "reward.overlong_buffer_tokens": 0,
        "algorithm.dataflow": "distill",
        "algorithm.advantage": "reverse_kl",
        "algorithm.loss": "policy_gradient",
        "algorithm.loss_options": {},
        "algorithm.updates_per_step": 1,
        "optim.lr": 1e-2,
        "optim.lr_warmup_steps": 0,
        "run.num_steps": 30,
        "run.save_every": 100,
    }
    return tiny_config(output, shape_of(STUDENT), settings, **changes)


def reverse_kl(config: Config) -> np.ndarray:
    rows = read_metrics(config.run_folder.path / "rl" / "metrics.jsonl")
    return np.array([row["teacher/reverse_kl"] for row in rows if "teacher/reverse_kl" in row])


@pytest.mark.long
def test_a_student_approaches_a_teacher_of_another_size(folder, tmp_path):
    config = make_config(folder, tmp_path)
    assert program.train(config, devices=jax.devices()[:1]) == 0
    kl = reverse_kl(config)
    assert len(kl) == 30
    # 2.5 nats at first; one layer of the student's comes to 1.7.
    assert kl[-5:].mean() < 0.75 * kl[:3].mean()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher__weights": ""}, "needs a teacher model; set teacher.weights"),
        ({"algorithm__advantage": "grpo"}, "set algorithm.advantage to reverse_kl"),
        ({"teacher__weights": "scores"}, "is a model of scores"),
        ({"teacher__weights": "few_tokens"}, "use one with the same tokenizer"),
        ({"teacher__weights": "other_tokens"}, "has another tokenizer: .* tokens have another id"),
        (
            {"algorithm__kl__loss_coef": 0.1},
            "the KL to its teacher over the whole vocabulary alone",
        ),
        ({"algorithm__dataflow": "grpo", "teacher__weights": ""}, "needs teacher_logprob_BT"),
    ],
)
def test_what_is_refused_before_anything_compiles(changes, message, folder, tmp_path):
    if directory := changes.get("teacher__weights"):
        changes = {"teacher__weights": str(folder / directory)}
    with pytest.raises(UserError, match=message):
        program.train(make_config(folder, tmp_path, **changes), devices=jax.devices()[:1])
