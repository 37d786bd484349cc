"""Shrinks a recipe for a rehearsal: model, lengths and batches get small, layout and algorithm stay.

    layers           2 of each pipeline stage, or a whole pattern of layers
    heads, experts   as they are, so that each shard has as many
    widths           64, or the smallest width above it that divides over heads and shards
    vocabulary       as it is: tokenizer and chat template are the recipe's own
    batches          two slots of each replica that samples, one row of each that trains

Weights are random. So no answer is right, and a reward is added in which answers differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.config.shapes import model_of, tokenizer_directory
from jaxrl.errors import UserError
from jaxrl.hub.hub_names import hub_name
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.pools import Pool
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.user import Responses
from jaxrl.trainer.resolved import resolve
from jaxrl.trainer.role_table import ROLES

NUM_STEPS = 4
"""Three steps that are finished, and one that a kill interrupts."""
SAVE_EVERY = 2

_HEAD_DIM, _WIDTH = 16, 64
_PROMPT_TOKENS, _RESPONSE_TOKENS, _CONVERSATION_TOKENS = 256, 16, 128
_PROBLEMS, _EVALUATION_PROBLEMS = 256, 4
_SHARES = ("fsdp", "expert", "context")

_RECIPE = '''"""Written by `jaxrl rehearse`: {recipe} with a small model, in the same layout."""

from jaxrl.config.command_line import load_recipe
from jaxrl.models.model_config import LoraConfig, ModelConfig, RopeScaling


def get_config():
    config = load_recipe({recipe!r})
    with config.unlocked():
        config.model = ModelConfig({model})
        config.placement = {placement!r}
        config.reward.functions = {functions!r}
        config.update_from_flattened_dict({settings!r})
    return config
'''


def share_of_spaces(responses: Responses) -> list[float]:
    """A reward of a model that has learnt nothing."""
    return [text.count(" ") / max(1, len(text)) for text in responses.texts]


def devices_of(config: Config) -> int:
    """The number of devices of a recipe."""
    return sum(pool.num_devices for pool in resolve(config).pools)


def smaller_layout(mesh: LayoutConfig, divisor: int) -> dict[str, Any]:
    """The settings of a layout with `divisor` times fewer replicas: of `data` first, then of `fsdp`.

    Raises:
      UserError: `divisor` does not divide the replicas.
    """
    layout = ParallelLayout.from_config(mesh)
    if layout.d % divisor:
        raise UserError(
            f"mesh.train {mesh.train} has d={layout.d} replicas, which do not divide by {divisor}; choose "
            "--hosts so that they do, or a smaller layout by --config.mesh.train and --config.mesh.generate"
        )
    shares = {name: getattr(layout, name) for name in _SHARES}
    left = divisor // math.gcd(divisor, layout.d // math.prod(shares.values()))
    for name in _SHARES:
        common = math.gcd(left, shares[name])
        shares[name], left = shares[name] // common, left // common
    smaller = dataclasses.replace(layout, d=layout.d // divisor, **shares)
    train = f"{smaller.p}-{smaller.t}-{smaller.d}"
    return {"train": train, "generate": smaller.generate, **shares}


def with_fewer_devices(config: Config, divisor: int) -> Config:
    """The config with `divisor` times fewer devices in every pool."""
    if not config.placement:
        mesh = dataclasses.replace(config.mesh, **smaller_layout(config.mesh, divisor))
        return dataclasses.replace(config, mesh=mesh)
    placement = {}
    for pool in resolve(config).pools:
        row = dict(config.placement[pool.name]) | smaller_layout(pool.config, divisor)
        row.pop("devices", None)
        if pool.own:
            row["layouts"] = {r: smaller_layout(own, divisor) for r, own in pool.own.items()}
        placement[pool.name] = row
    return dataclasses.replace(config, placement=placement)


def small_model(
    model: ModelConfig, layouts: Sequence[ParallelLayout], *, width: int = _WIDTH
) -> ModelConfig:
    """The model with the sizes that the head of this file lists, or at least `width` wide."""
    unit = math.lcm(
        16, 2 * model.num_heads, *(n for each in layouts for n in (each.d, each.t, each.t_g))
    )
    width = -(-width // unit) * unit
    first = min(model.first_dense_layers, 1)
    stages = math.lcm(*(each.p for each in layouts))
    sizes: dict[str, Any] = {"d_model": width, "d_ff": width, "first_dense_layers": first}
    sizes["num_layers"] = first + stages * max(2, len(model.layer_pattern))
    sizes |= {n: width for n in ("dense_d_ff", "shared_d_ff") if getattr(model, n)}
    if model.sharing_layers:
        sizes["sharing_layers"] = len(model.layer_pattern)
        sizes["num_layers"] += len(model.layer_pattern)
    rope = model.rope_scaling
    # Dimensions of latent attention and factors of single wavelengths depend on the size of a head.
    if not (model.kv_latent or (rope and rope.kind == "longrope")):
        # Many architectures have no head size of their own. Half of what is rotated is a whole number.
        own = model.head_dim * model.num_heads != model.d_model or model.rotary_fraction != 1
        sizes["head_dim"] = _HEAD_DIM if own else width // model.num_heads
        sizes["full_head_dim"] = _HEAD_DIM if model.full_head_dim else 0
    if model.has_state:
        sizes |= {"delta_key_dim": _HEAD_DIM, "delta_value_dim": _HEAD_DIM}
    return dataclasses.replace(model, **sizes)


def small_settings(config: Config, pools: Sequence[Pool]) -> dict[str, Any]:
    """The other settings that change, by dotted name."""
    layouts = [layout for pool in pools for layout in pool.layouts.values()]
    replicas = math.lcm(*(each.num_devices // (each.p_g * each.t_g) for each in layouts))
    rollout, data, trains = config.rollout, config.data, bool(config.run.num_steps)
    samples = min(rollout.num_samples, 2)
    prompts = max(2, -(-replicas // samples))
    # Even, for two updates.
    prompts += prompts * samples % 2
    response = min(
        rollout.max_response_tokens, _CONVERSATION_TOKENS if rollout.agent else _RESPONSE_TOKENS
    )
    settings: dict[str, Any] = {
        "weights": "",
        "adapter": "",
        "tokenizer.path": tokenizer_directory(config) or config.weights,
        **{f"mesh.{name}": value for name, value in vars(config.mesh).items()},
        "mesh.simulated_devices": sum(pool.num_devices for pool in pools),
        "critic.weights": "",
        "critic.warmup_steps": min(config.critic.warmup_steps, 1),
        "rollout.num_prompts": prompts,
        "rollout.num_samples": samples,
        "rollout.generation_prompts": prompts,
        "rollout.max_generation_batches": 1 if rollout.max_generation_batches == 1 else 2,
        "rollout.on_shortage": "fill",
        "rollout.slots": 2 * replicas,
        "rollout.prefill_prompts": replicas,
        "rollout.max_response_tokens": response,
        "rollout.min_response_tokens": min(rollout.min_response_tokens, response // 2),
        "rollout.tokens_per_dispatch": 8,
        "rollout.speculate": 0,
        "rollout.cache_tokens": 0,
        "rollout.dtype": "float32",
        "reward.overlong_buffer_tokens": min(config.reward.overlong_buffer_tokens, 4),
        "algorithm.updates_per_step": min(config.algorithm.updates_per_step, 2),
        "train.rows": math.lcm(*(each.row_parts for each in layouts)),
        "train.row_tokens": "auto",
        "train.logprob_chunk_tokens": 64,
        "train.pipeline_microbatches": 0,
        "train.dtype": "float32",
        "evaluation.every": SAVE_EVERY,
        "evaluation.num_samples": 1,
        "sft.num_steps": min(config.sft.num_steps, 2 if trains else NUM_STEPS),
        "sft.examples_per_step": min(config.sft.examples_per_step, 8),
        "sft.save_every": SAVE_EVERY,
        "run.num_steps": NUM_STEPS if trains else 0,
        "run.save_every": SAVE_EVERY,
        "run.loggers": (),
    }
    if data.overlong != "error":
        settings["data.max_prompt_tokens"] = min(data.max_prompt_tokens, _PROMPT_TOKENS)
    settings |= {f"{name}.size": _PROBLEMS for name in data.training_sources}
    return settings | {f"{name}.size": _EVALUATION_PROBLEMS for name in data.evaluation_sources}


def recipe_text(recipe: str, config: Config, overrides: Sequence[str]) -> str:
    """The text of a recipe that is `recipe` with a small model.

    Args:
      recipe: the recipe, as `load_recipe` takes it.
      config: its config, with overrides and with the layout of the rehearsal.
      overrides: names of settings that stay as they are.

    Raises:
      UserError: the shape of the model is not known, or a role has weights on the hub.
    """
    for kind in ROLES.values():
        if kind.setting and (name := hub_name(kind.weights(config))):
            raise UserError(
                f"{kind.setting} {name} is not on this machine, and a rehearsal makes no small model of it; "
                f"give the directory of a small one, --config.{kind.setting}=DIRECTORY"
            )
    pools = resolve(config).pools
    layouts = [layout for pool in pools for layout in pool.layouts.values()]
    settings = small_settings(config, pools)
    functions = dict(config.reward.functions)
    if config.run.num_steps:
        path = f"{__name__}:{share_of_spaces.__name__}"
        functions["rehearsal"] = {"path": path, "weight": 1.0}
    model, usual = small_model(model_of(config)[0], layouts), vars(ModelConfig())
    return _RECIPE.format(
        recipe=recipe,
        model=", ".join(f"{n}={value!r}" for n, value in vars(model).items() if value != usual[n]),
        placement=dict(config.placement),
        functions=functions,
        settings={n: value for n, value in settings.items() if n not in overrides},
    )
