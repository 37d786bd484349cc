"""Whether sampler and trainer of a recipe agree, in its layouts and in several types: table and certificate.

    jaxrl certify --config configs/dapo_qwen32b.py --out dapo_qwen32b.json

A small model with the recipe's heads and experts samples on one simulated device, and in the recipe's
layouts: every kind of axis that these split stays split, on 8 devices if that is enough. Then the trainer
computes the same tokens. Weights are random, and logits are divided by 0.25 so that draws are as uncertain
as a text's. The columns are

    differ     samples that differ from those of one device
    drawn      share of the tokens that the trainer draws again, by its own logits and the sampler's noise
    mean, max  distance of the log-probabilities of sampler and trainer
    layouts    largest distance of the sampler's log-probabilities from those of one device, over equal tokens
    time       processor time of sampling with `rollout.deterministic`, relative to without it

A run with `run.certificate` checks at its start that the file is about it, and that what it requires held
(docs/proofs.md).
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.command_line import load_config, take_overrides
from jaxrl.config.schema import Config
from jaxrl.config.shapes import model_of
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.devices import build_mesh, simulate
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models.decoder import init_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.learner import TrainState
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.redraw import draws_of
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.drivers import build_backend
from jaxrl.rollout.settings import EngineConfig
from jaxrl.tracking.durable import write_atomically
from jaxrl.trainer.findings import REINFORCEMENT
from jaxrl.trainer.program import training_of
from jaxrl.types import Completions, Prompts
from jaxrl_pods.rehearsed_recipe import small_model
from jaxrl_proofs.certificate import faults, layouts_of, subject_of

# Devices that are simulated, if they are enough for two of every kind of axis.
_DEVICES = 8
_WIDTH, _MOST_TOKEN_IDS = 256, 16_384
_PROMPTS, _SAMPLES, _PROMPT_TOKENS, _RESPONSE_TOKENS = 16, 4, 16, 32
# Logits of random weights have a variance of 1.
_TEMPERATURE = 0.25
# Timed after the first call, which compiles; the quickest counts.
_TIMED = 2
# Largest mean distance of the log-probabilities of sampler and trainer, by the type of the sampler. In
# bfloat16 dense models have 0.02 to 0.04, and a mixture whose routers choose apart 0.08 to 0.11 (2026-11-29).
_BOUNDS = {"float32": 1e-4, "bfloat16": 0.2}


def main(argv: Sequence[str]) -> int:
    """Certifies a recipe; returns 0 if what a certificate requires held, else 1."""
    program, *arguments = argv
    overrides, rest = take_overrides(arguments, Config)
    parser = command_parser(program, __doc__)
    parser.add_argument("--config", required=True, help="recipe file")
    parser.add_argument(
        "--out", type=pathlib.Path, help="file of the certificate (default: NAME.json)"
    )
    args = parser.parse_args(rest)
    config = load_config(Config, args.config, overrides)
    out = args.out or pathlib.Path(f"{config.name}.json")
    simulate(sum(layout.num_devices for layout in small_layouts(config)))
    certificate = certified(config, lambda text: print(text, flush=True))
    certificate |= {"recipe": args.config, "date": datetime.date.today().isoformat()}
    write_atomically(out, json.dumps(certificate, indent=1).encode())
    wrong = faults(certificate)
    print(*wrong, f"certificate: {out}", sep="\n")
    return int(bool(wrong))


def small_layouts(config: Config) -> list[ParallelLayout]:
    """The layouts of a recipe on few devices: the actor's, and that of sampling if it has its own pool.

    Raises:
      UserError: the recipe does not sample, or leaves its layout open.
    """
    if training_of(config).kind != REINFORCEMENT:
        raise UserError(f"{config.name} trains without sampling; take a recipe that samples")
    layouts = [ParallelLayout.from_config(each) for each in layouts_of(config)]
    return [smaller_layout(layout, _DEVICES // len(layouts)) for layout in layouts]


def certified(config: Config, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures a recipe on the devices of this process, and returns its certificate.

    Args:
      config: config of the recipe.
      say: called with each line of the table.
    """
    small = small_layouts(config)
    model = small_model(model_of(config)[0], small, width=_WIDTH)
    ids = min(model.vocab_size, _MOST_TOKEN_IDS)
    model = dataclasses.replace(model, vocab_size=ids, num_tokens=ids)
    say(
        f"{config.name} in {' and '.join(layout.name for layout in small)}: {model.num_layers} layers, width "
        f"{model.d_model}, {model.num_heads} heads, {ids:,} token ids"
    )
    say(_line("type", "differ", "drawn", "mean", "max", "layouts", "time"))
    rows = []
    for kind, deterministic in itertools.product(_kinds(config), (False, True)):
        if kind[0] == "float32" and deterministic:
            continue
        dtype, weights, cache = kind
        name = dtype + (weights and f", {weights} weights") + (cache and f", {cache} cache")
        row: dict[str, Any] = {
            "type": name,
            "deterministic": deterministic,
            "bound": _BOUNDS[dtype],
        }
        row |= _measured(config, model, small, kind, deterministic)
        if deterministic and "error" not in row:
            row["time"] = row["seconds"] / rows[-1]["seconds"]
        rows.append(row)
        say(_told(row))
    return {"subject": subject_of(config), "on": [layout.name for layout in small], "rows": rows}


def smaller_layout(layout: ParallelLayout, most: int) -> ParallelLayout:
    """The layout with every kind of axis that it splits, on at most `most` devices if these are enough."""
    shared, k = math.gcd(layout.t, layout.t_g), layout.fsdp_gen
    data = layout.d // (layout.fsdp * layout.expert * layout.context)
    # Those that grow back first come first: what splits a sum counts most.
    whole = [shared, layout.t // shared, k, layout.expert, layout.fsdp // k, layout.context, data]
    whole += [layout.p_g, layout.p // layout.p_g]
    sizes = list(map(_factor, whole))
    for i, size in enumerate(whole):
        while (more := _factor(size // sizes[i])) > 1 and math.prod(sizes) * more <= most:
            sizes[i] *= more
    shared, micro, k, expert, fsdp, context, data, p_g, stages = sizes
    shares = {"fsdp": fsdp * k, "expert": expert, "context": context}
    d = math.prod(shares.values()) * data
    return dataclasses.replace(
        layout, p=p_g * stages, t=shared * micro, d=d, p_g=p_g, t_g=shared * k, **shares
    )


def _factor(size: int) -> int:
    """The smallest prime factor; 1 of 1."""
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def _kinds(config: Config) -> list[tuple[str, str, str]]:
    """Types of activations, weights and cache that are tried: usual ones, and the recipe's if others."""
    own = config.rollout
    usual = ("float32", "", ""), ("bfloat16", "", ""), ("bfloat16", "", "int8")
    return list(dict.fromkeys((*usual, (own.dtype, own.weights_dtype, own.kv_dtype))))


def _measured(
    config: Config,
    model: ModelConfig,
    layouts: Sequence[ParallelLayout],
    kind: tuple[str, str, str],
    deterministic: bool,
) -> dict[str, Any]:
    """The figures of one type, with `rollout.deterministic` or without it."""
    replicas = math.lcm(*(layout.num_devices // (layout.p_g * layout.t_g) for layout in layouts))
    num_prompts = -(-_PROMPTS // replicas) * replicas
    settings = config.rollout.engine_settings(
        **dict(zip(("dtype", "weights_dtype", "kv_dtype"), kind, strict=True)),
        **{"deterministic": deterministic, "cache_tokens": 0, "speculate": 0},
        **{"slots": num_prompts * _SAMPLES, "prefill_prompts": num_prompts},
    )
    routes = config.train.replay_routes
    # No token ends a sample.
    engine = EngineConfig(
        **settings,
        **{"max_prompt_tokens": _PROMPT_TOKENS, "max_response_tokens": _RESPONSE_TOKENS},
        **{"stop_ids": (), "keeps_routes": routes},
    )
    rows: Any = {"rows": math.lcm(*(layout.row_parts for layout in layouts))}
    train = TrainConfig(dtype=engine.dtype, logprob_chunk_tokens=64, replay_routes=routes, **rows)
    truncation = config.rollout.truncation(renormalized=config.truncates_logprobs)
    options = SamplingOptions(_SAMPLES, config.seed, 0, _TEMPERATURE, truncation)
    params = init_params(model, jax.random.key(0))

    def build(layouts: Sequence[ParallelLayout]) -> Actor:
        """Trains in the first layout and samples in the last, on the first devices there are."""
        ends = itertools.accumulate(layout.num_devices for layout in layouts)
        meshes = [
            build_mesh(layout, jax.devices()[end - layout.num_devices : end])
            for layout, end in zip(layouts, ends, strict=True)
        ]
        texts = lambda samples: [""] * len(samples)  # noqa: E731
        actor = Actor(
            model,
            meshes[0],
            **{"train": train, "optim": config.optim, "seed": 0, "temperature": _TEMPERATURE},
            truncation=truncation if config.truncates_logprobs else None,
            backend=build_backend("offline", model, meshes[-1], engine, texts),
            state_rules=state_rules(layouts[0].sharding),
        )
        typed = jax.tree.map(lambda x, like: x.astype(like.dtype), params, actor.shapes)
        actor.state = TrainState(jax.device_put(typed, actor.train_shardings), (), jnp.int32(0))
        return actor

    prompts = _prompts(num_prompts, ids=model.vocab_size)
    try:
        one, actor = build([ParallelLayout(1, 1, 1, 1, 1)]), build(layouts)
    except UserError as error:
        return {"error": str(error)}
    alone, samples, seconds = one.generate(prompts, options), actor.generate(prompts, options), []
    for _ in range(_TIMED):
        # Of all cores: by the clock, whatever else the machine does would count.
        began_s = time.process_time()
        actor.generate(prompts, options)
        seconds.append(time.process_time() - began_s)
    found = _compared(alone, samples) | _learned(actor, samples, options)
    one.close()
    actor.close()
    return found | {"seconds": min(seconds)}


def _prompts(number: int, *, ids: int) -> Prompts:
    rng = np.random.default_rng(0)
    lengths = rng.integers(_PROMPT_TOKENS // 2, _PROMPT_TOKENS + 1, number)
    tokens = tuple(rng.integers(0, ids, n).astype(np.int32) for n in lengths)
    blank = ("",) * number
    return Prompts(np.arange(number), tokens, blank, blank, blank)


def _compared(alone: Completions, samples: Completions) -> dict[str, Any]:
    """How samples differ from those of one device."""
    differ, apart = 0, 0.0
    for b, (old, new) in enumerate(zip(alone.tokens, samples.tokens, strict=True)):
        equal = int(np.append(old != new, True).argmax())
        differ += equal < len(old)
        gaps = alone.rollout_logprob[b][:equal] - samples.rollout_logprob[b][:equal]
        apart = max(apart, float(np.abs(gaps).max(initial=0.0)))
    return {"samples": len(samples), "differ": differ, "layouts": apart}


def _learned(actor: Actor, samples: Completions, options: SamplingOptions) -> dict[str, Any]:
    """How the trainer's log-probabilities differ from the sampler's, and its draws."""
    tokens = _PROMPT_TOKENS + _RESPONSE_TOKENS
    # Everything in one microbatch.
    rows = -(-len(samples) // actor.train.rows) * actor.train.rows
    packed, _ = pack_completions(samples, PackedShape(1, 1, rows, tokens))
    batch = actor.place(packed)
    trainer = np.asarray(actor.logprobs(batch))
    gaps = np.abs(trainer - np.asarray(packed.rollout_logprob))[np.asarray(packed.loss_mask) > 0]
    draws = draws_of(samples, options)
    drawn = draws and actor.same_tokens(batch, draws)
    assert drawn is not None, "every sample has tokens, and none a repetition penalty"
    return {"mean": float(gaps.mean()), "max": float(gaps.max()), "drawn": float(drawn)}


def _told(row: dict[str, Any]) -> str:
    name = row["type"] + (", deterministic" if row["deterministic"] else "")
    if "error" in row:
        return f"{name}: not possible: {row['error']}"
    figures = f"{row['drawn']:.4f}", *(f"{row[name]:.1e}" for name in ("mean", "max", "layouts"))
    ratio = f"{row['time']:.2f}" if "time" in row else ""
    return _line(name, f"{row['differ']} of {row['samples']}", *figures, ratio)


def _line(name: str, *cells: str) -> str:
    return f"{name:36}" + "".join(f"{cell:>10}" for cell in cells)
