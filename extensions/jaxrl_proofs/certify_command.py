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
from jaxrl.config.shapes import engine_config, model_of
from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.mesh.devices import build_mesh, simulate
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, shards_of
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models.decoder import init_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.learner import TrainState
from jaxrl.roles.packing import RowLimits
from jaxrl.roles.policy import Actor
from jaxrl.roles.redraw import draws_of
from jaxrl.rollout.drivers import build_backend
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
_TIMED = 3


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
        raise UserError(
            f"{config.name} trains without sampling (run.num_steps {config.run.num_steps}, preference.loss "
            f"{config.preference.loss!r}), so there is no sampler to certify; take a recipe that samples"
        )
    layouts = [ParallelLayout.from_config(each) for each in layouts_of(config)]
    return [smaller_layout(layout, _DEVICES // len(layouts)) for layout in layouts]


def certified(config: Config, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures a recipe on the devices of this process, and returns its certificate.

    Args:
      config: config of the recipe.
      say: called with each line of the table.
    """
    small = small_layouts(config)
    given, _ = model_of(config)
    model = small_model(given, small, width=_WIDTH)
    ids = min(model.vocab_size, _MOST_TOKEN_IDS)
    model = dataclasses.replace(model, vocab_size=ids, num_tokens=ids)
    say(
        f"{config.name} in {' and '.join(layout.name for layout in small)}: {model.num_layers} layers, width "
        f"{model.d_model}, {model.num_heads} heads, {ids:,} token ids"
    )
    say(_line("type", "differ", "drawn", "mean", "max", "layouts", "time"))
    rows = []
    for kind, deterministic in itertools.product(_kinds(config), (False, True)):
        if kind["dtype"] == "float32" and deterministic:
            continue
        row = _measured(_small_config(config, kind, deterministic, small), model, small)
        row |= {"type": _name(kind), "deterministic": deterministic}
        if deterministic and "error" not in row:
            row["time"] = row["seconds"] / rows[-1]["seconds"]
        rows.append(row)
        say(_told(row))
    return {"subject": subject_of(config), "on": [layout.name for layout in small], "rows": rows}


def smaller_layout(layout: ParallelLayout, most: int) -> ParallelLayout:
    """The layout with every kind of axis that it splits, on at most `most` devices if these are enough."""
    shared = math.gcd(layout.t, layout.t_g)
    whole = {
        "tensor": shared,
        "tensor_micro": layout.t // shared,
        "fsdp_gen": layout.fsdp_gen,
        "expert": layout.expert,
        "fsdp": layout.fsdp // layout.fsdp_gen,
        "context": layout.context,
        "data": layout.d // (layout.fsdp * layout.expert * layout.context),
        "stage": layout.p_g,
        "stage_micro": layout.p // layout.p_g,
    }
    sizes = {name: _factor(size) for name, size in whole.items()}
    for name, size in whole.items():
        while (more := _factor(size // sizes[name])) > 1:
            if math.prod(sizes.values()) * more > most:
                break
            sizes[name] *= more
    fsdp = sizes["fsdp"] * sizes["fsdp_gen"]
    return dataclasses.replace(
        layout,
        p=sizes["stage"] * sizes["stage_micro"],
        t=sizes["tensor"] * sizes["tensor_micro"],
        d=fsdp * sizes["expert"] * sizes["context"] * sizes["data"],
        p_g=sizes["stage"],
        t_g=sizes["tensor"] * sizes["fsdp_gen"],
        fsdp=fsdp,
        expert=sizes["expert"],
        context=sizes["context"],
    )


def _factor(size: int) -> int:
    """The smallest prime factor; 1 of 1."""
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def _kinds(config: Config) -> list[dict[str, Any]]:
    """The types of weights and cache that are tried: three usual ones, and the recipe's if it is another."""
    own = {name: getattr(config.rollout, name) for name in ("dtype", "weights_dtype", "kv_dtype")}
    usual = [
        {"dtype": "float32", "weights_dtype": "", "kv_dtype": ""},
        {"dtype": "bfloat16", "weights_dtype": "", "kv_dtype": ""},
        {"dtype": "bfloat16", "weights_dtype": "", "kv_dtype": "int8"},
    ]
    return usual + ([] if own in usual else [own])


def _name(kind: dict[str, Any]) -> str:
    parts = [kind["dtype"]]
    parts += [f"{kind['weights_dtype']} weights"] if kind["weights_dtype"] else []
    parts += [f"{kind['kv_dtype']} cache"] if kind["kv_dtype"] else []
    return ", ".join(parts)


def _small_config(
    config: Config, kind: dict[str, Any], deterministic: bool, layouts: Sequence[ParallelLayout]
) -> Config:
    """The config with small batches, and with the type of the sampler; the trainer has the same."""
    replicas = math.lcm(*(layout.num_devices // (layout.p_g * layout.t_g) for layout in layouts))
    prompts = -(-_PROMPTS // replicas) * replicas
    rollout = dataclasses.replace(
        config.rollout,
        **kind,
        deterministic=deterministic,
        num_prompts=prompts,
        num_samples=_SAMPLES,
        slots=prompts * _SAMPLES,
        prefill_prompts=prompts,
        max_response_tokens=_RESPONSE_TOKENS,
        min_response_tokens=0,
        cache_tokens=0,
        speculate=0,
        tokens_per_dispatch=_RESPONSE_TOKENS,
        stop_strings=(),
        stop_ids=(),
        agent="",
        temperature=_TEMPERATURE,
        driver="offline",
        max_staleness=0,
        schedule="",
    )
    rows = math.lcm(*(layout.row_parts for layout in layouts))
    train = dataclasses.replace(
        config.train,
        dtype=kind["dtype"],
        rows=rows,
        logprob_chunk_tokens=64,
        pipeline_microbatches=0,
        share_prompts=False,
        remat="none",
    )
    data = dataclasses.replace(config.data, max_prompt_tokens=_PROMPT_TOKENS)
    reward = dataclasses.replace(config.reward, overlong_buffer_tokens=0)
    return dataclasses.replace(config, rollout=rollout, train=train, data=data, reward=reward)


def _measured(
    config: Config, model: ModelConfig, layouts: Sequence[ParallelLayout]
) -> dict[str, Any]:
    """One row of the table, of one type with `rollout.deterministic` or without it."""
    prompts, params = _prompts(config, model), init_params(model, jax.random.key(0))
    options = config.rollout.sampling(config.seed)
    try:
        one = _actor(config, model, [ParallelLayout(1, 1, 1, 1, 1)], params)
        alone = one.generate(prompts, options)
        one.close()
        actor = _actor(config, model, layouts, params)
    except UserError as error:
        return {"error": str(error)}
    samples, seconds = actor.generate(prompts, options), []
    for _ in range(_TIMED):
        # Of all cores: by the clock, whatever else the machine does would count.
        began_s = time.process_time()
        actor.generate(prompts, options)
        seconds.append(time.process_time() - began_s)
    row = _compared(alone, samples) | _learned(config, actor, samples)
    actor.close()
    return row | {"seconds": min(seconds)}


def _prompts(config: Config, model: ModelConfig) -> Prompts:
    rng, number = np.random.default_rng(config.seed), config.rollout.num_prompts
    lengths = rng.integers(_PROMPT_TOKENS // 2, _PROMPT_TOKENS + 1, number)
    tokens = tuple(rng.integers(0, model.vocab_size, n).astype(np.int32) for n in lengths)
    blank = ("",) * number
    return Prompts(np.arange(number), tokens, blank, blank, blank)


def _actor(
    config: Config, model: ModelConfig, layouts: Sequence[ParallelLayout], params: Any
) -> Actor:
    """An actor that trains in the first layout and samples in the last, on the first devices there are."""
    first, meshes = 0, []
    for layout in layouts:
        meshes.append(build_mesh(layout, jax.devices()[first : first + layout.num_devices]))
        first += layout.num_devices
    # No token ends a sample.
    engine = engine_config(
        config,
        (),
        prompts_per_batch=config.rollout.num_prompts,
        replicas=shards_of("batch", GENERATE_RULES, meshes[-1]),
    )
    texts = lambda samples: [""] * len(samples)  # noqa: E731
    options = config.rollout.sampling(config.seed)
    actor = Actor(
        model,
        meshes[0],
        temperature=_TEMPERATURE,
        truncation=options.truncation if config.truncates_logprobs else None,
        backend=build_backend("offline", model, meshes[-1], engine, texts),
        train=config.train,
        optim=config.optim,
        state_rules=state_rules(layouts[0].sharding),
        seed=config.seed,
    )
    typed = jax.tree.map(lambda x, like: x.astype(like.dtype), params, actor.shapes)
    actor.state = TrainState(jax.device_put(typed, actor.train_shardings), (), jnp.int32(0))
    return actor


def _compared(alone: Completions, samples: Completions) -> dict[str, Any]:
    """How samples differ from those of one device."""
    differ, apart = 0, 0.0
    for b, (old, new) in enumerate(zip(alone.tokens, samples.tokens, strict=True)):
        equal = int(np.append(old != new, True).argmax())
        differ += equal < len(old)
        gaps = alone.rollout_logprob[b][:equal] - samples.rollout_logprob[b][:equal]
        apart = max(apart, float(np.abs(gaps).max(initial=0.0)))
    return {"samples": len(samples), "differ": differ, "layouts": apart}


def _learned(config: Config, actor: Actor, samples: Completions) -> dict[str, Any]:
    """How the trainer's log-probabilities differ from the sampler's, and its draws."""
    tokens = _PROMPT_TOKENS + _RESPONSE_TOKENS
    # Everything in one microbatch.
    rows = -(-len(samples) // config.train.rows) * config.train.rows
    shape = RowLimits(rows, tokens, tokens).shape(len(samples), minibatches=1)
    packed, _ = pack_completions(samples, shape)
    batch = actor.place(packed)
    draws = draws_of(samples, config.rollout.sampling(config.seed))
    assert draws is not None, "a run has no repetition penalty"
    trainer = np.asarray(actor.logprobs(batch))
    gaps = np.abs(trainer - np.asarray(packed.rollout_logprob))[np.asarray(packed.loss_mask) > 0]
    drawn = actor.same_tokens(batch, draws)
    return {
        "mean": float(gaps.mean()),
        "max": float(gaps.max()),
        "drawn": 1.0 if drawn is None else float(drawn),
    }


def _told(row: dict[str, Any]) -> str:
    name = row["type"] + (", deterministic" if row["deterministic"] else "")
    if "error" in row:
        return f"{name}: not possible: {row['error']}"
    figures = f"{row['drawn']:.4f}", *(f"{row[name]:.1e}" for name in ("mean", "max", "layouts"))
    ratio = f"{row['time']:.2f}" if "time" in row else ""
    return _line(name, f"{row['differ']} of {row['samples']}", *figures, ratio)


def _line(name: str, *cells: str) -> str:
    return f"{name:36}" + "".join(f"{cell:>10}" for cell in cells)
