"""Runs that train in seconds: a two-layer model of 288 tokens, few and short samples."""

import pathlib
from typing import Any

from jaxrl.config.config_tree import from_config_dict, to_config_dict
from jaxrl.config.schema import Config
from jaxrl.models.model_config import ModelConfig

MODEL = ModelConfig(
    vocab_size=288, num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
)
SHAPE = ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")


def shape_of(model: ModelConfig) -> dict[str, int]:
    """The settings of a model's shape."""
    return {f"model.{name}": getattr(model, name) for name in SHAPE}


SETTINGS = shape_of(MODEL) | {
    "data.template": "{prompt}\n",
    "data.max_prompt_tokens": 16,
    "rollout.num_prompts": 8,
    "rollout.num_samples": 4,
    "rollout.generation_prompts": 16,
    "rollout.max_response_tokens": 8,
    "rollout.slots": 32,
    "rollout.prefill_prompts": 8,
    "rollout.tokens_per_dispatch": 4,
    "reward.overlong_buffer_tokens": 2,
    "train.rows": 4,
    "train.row_tokens": 48,
    "optim.lr": 1e-3,
    "optim.lr_warmup_steps": 2,
}


def problems_in(folder: pathlib.Path) -> dict[str, str]:
    """The settings of the files that `digits.write_problems` leaves in a folder."""
    return {
        f"data.{name}.{field}": value
        for name in ("train", "evaluation")
        for field, value in (("source", "repeat"), ("path", str(folder / f"{name}.jsonl")))
    }


def tiny_config(output: pathlib.Path, *settings: dict[str, Any], **changes: Any) -> Config:
    """`SETTINGS`, then others by dotted names, then changes with two underscores for a dot."""
    config = to_config_dict(Config())
    named = SETTINGS | {"run.output": str(output)}
    for more in (*settings, {name.replace("__", "."): value for name, value in changes.items()}):
        named |= more
    config.update_from_flattened_dict(named)
    return from_config_dict(Config, config)
