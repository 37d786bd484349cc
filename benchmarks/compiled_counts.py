"""What programs launch and move on accelerators that are not here: compiled ahead of time, and counted.

    python benchmarks/compiled_counts.py --model qwen2.5-1.5b --topology h200:1x1 [--rows 16 256] [--json]
    python benchmarks/compiled_counts.py --model qwen2.5-1.5b --topology h200:1x1 --update --remat full
    python benchmarks/compiled_counts.py --model qwen2.5-32b --topology h100:1x8 --tensor 8 --rows 243
    python benchmarks/compiled_counts.py --recipe configs/dapo_qwen7b.py --topology h100:1x8 --layers 4

Of `generate` the figures are of one token of the decode loop, plainly sampled; of `update` of one microbatch
with a row of --tokens tokens, and its optimiser step. With --recipe they are of `generate`, with the model,
layout, cache and slots of the recipe (--rows a device where it leaves slots open). --layers cuts the depth.
`--json` prints one object a program. GPUs need the extra `aot-gpu`, TPUs `aot`; nothing runs, and nothing is
autotuned. What each figure counts: `jaxrl_planner/compiled/counts.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl.config.command_line import load_config
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, TRAIN_RULES, shards_of
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import model_shapes
from jaxrl.private import compiler_options
from jaxrl.roles.losses import policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl_planner.compiled.ahead import compile_piece
from jaxrl_planner.compiled.counts import CompiledText
from jaxrl_planner.compiled.programs import (
    Piece,
    engine_programs,
    learner_programs,
    sampling_programs,
)
from jaxrl_planner.hardware.cluster import Topology, read_topology
from jaxrl_planner.make_plan import roles_on
from jaxrl_planner.simulation.workload import LengthDistribution, Workload
from jaxrl_planner.step_load import StepLoad
from jaxrl_planner.step_load import load_of as recipe_load

COLUMNS = (
    *("kernels", "kernels_a_layer", "weight_bytes_copied", "other_bytes", "product_bytes"),
    *("logits_passes", "host_visits", "loops_beside"),
)
LOSS = policy(
    "clipped", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}, shares_forward=True
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-1.5b", help="name of a published shape")
    parser.add_argument(
        "--recipe", default="", help="a recipe, whose actor samples; not with --model"
    )
    parser.add_argument("--topology", default="h200:1x1")
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share the heads")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 256])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--response", type=int, default=1024, help="longest, in tokens")
    parser.add_argument("--dispatch", type=int, default=16, help="tokens of a dispatch")
    parser.add_argument("--cache", default="paged")
    parser.add_argument("--update", action="store_true", help="the update in place of generate")
    parser.add_argument("--tokens", type=int, default=8192, help="of a row of the update")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    # Else JAX looks for devices that are not here.
    jax.config.update("jax_platforms", "cpu")
    try:
        for number, line in enumerate(lines(args)):
            show(line, as_json=args.json, first=not number)
    except UserError as error:
        raise SystemExit(str(error)) from error


def lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One a program."""
    if args.recipe:
        yield of_recipe(args, read_topology(args.topology))
        return
    model = model_shapes(args.model)
    if args.layers:
        model = dataclasses.replace(model, num_layers=args.layers)
    topology = read_topology(args.topology)
    layout = ParallelLayout.from_config(LayoutConfig(train=f"1-{args.tensor}-1"))
    if args.tensor > len(topology.devices):
        raise UserError(
            f"{args.topology} has {len(topology.devices)} devices, fewer than --tensor {args.tensor}"
        )
    mesh = build_mesh(layout, list(topology.devices)[: args.tensor])
    head = {"model": args.model, "layers": model.num_layers, "topology": args.topology}
    if args.update:
        yield head | {"program": "update", "rows": 1} | counted_update(args, model, mesh, topology)
        return
    for rows in args.rows:
        found = counted_decoding(args, model, mesh, topology, rows)
        yield head | {"program": "generate", "rows": rows} | found


def of_recipe(args: argparse.Namespace, topology: Topology) -> dict[str, Any]:
    """A token of the decode loop of a recipe."""
    config = load_config(Config, args.recipe, {})
    model, rollout = config.model, config.rollout
    if args.layers:
        model = dataclasses.replace(model, num_layers=args.layers)
    if rollout.slots == "auto":
        slots = args.rows[0] * len(topology.devices)
        rollout = dataclasses.replace(rollout, slots=slots)
    # The hub is not asked.
    config = dataclasses.replace(config, model=model, rollout=rollout, weights="")
    roles = roles_on(config, topology)
    engine, actor = roles.engine, roles.roles.actor
    programs = sampling_programs(actor, engine, recipe_load(config))
    (piece,) = next(program for program in programs if program.name == "generate").pieces
    rows = engine.config.slots // engine.shards
    logits = rows * model.vocab_size // shards_of("vocab", GENERATE_RULES, engine.mesh)
    text, in_graphs = compiled(piece, topology)
    read = CompiledText(text, topology.accelerator.platform, logits=logits)
    counts = read.decoding(model.num_layers, in_graphs=in_graphs)
    head = {"model": config.name, "layers": model.num_layers, "topology": args.topology}
    return head | {"program": "generate", "rows": rows} | dataclasses.asdict(counts)


def load_of(prompts: int, prompt: int, response: int) -> StepLoad:
    lengths = LengthDistribution.exactly(prompt), LengthDistribution.exactly(response)
    work = Workload(prompts=prompts, prompt_lengths=lengths[0], response_lengths=lengths[1])
    return StepLoad(work, "as given")


def counted_decoding(
    args: argparse.Namespace, model: ModelConfig, mesh: Any, topology: Topology, rows: int
) -> dict[str, Any]:
    """A token of the decode loop."""
    config = EngineConfig(
        slots=rows,
        smallest_bucket=rows,
        prefill_prompts=min(rows, 32),
        max_prompt_tokens=args.prompt,
        max_response_tokens=args.response,
        tokens_per_dispatch=args.dispatch,
        stop_ids=(),
        dtype="bfloat16",
        cache=args.cache,
    )
    graph, shapes, axes = decoder_graph(model)
    engine = Engine(model, graph, mesh, config)
    load = load_of(rows, args.prompt, args.response)
    programs = engine_programs(engine, load, role="actor", shapes=shapes, axes=axes)
    (piece,) = next(program for program in programs if program.name == "generate").pieces
    logits = rows * model.vocab_size // shards_of("vocab", GENERATE_RULES, mesh)
    text, in_graphs = compiled(piece, topology)
    read = CompiledText(text, topology.accelerator.platform, logits=logits)
    return dataclasses.asdict(read.decoding(model.num_layers, in_graphs=in_graphs))


def counted_update(
    args: argparse.Namespace, model: ModelConfig, mesh: Any, topology: Topology
) -> dict[str, Any]:
    """An update of one microbatch of one row."""
    train = TrainConfig(rows=1, row_tokens=args.tokens, dtype="bfloat16", remat=args.remat)
    actor = Actor(model, mesh, train=train, optim=OptimConfig(), temperature=1.0, seed=0)
    shape, load = PackedShape(1, 1, 1, args.tokens), load_of(1, args.prompt, args.response)
    programs = learner_programs("actor", actor, LOSS, shape, load)
    (piece,) = next(program for program in programs if program.name == "update").pieces
    platform = topology.accelerator.platform
    chunk = min(train.positions_of_logits(model.vocab_size, platform), args.tokens)
    logits = chunk * model.vocab_size // shards_of("vocab", TRAIN_RULES, mesh)
    text, _ = compiled(piece, topology)
    read = CompiledText(text, platform, logits=logits, weights="state.params")
    found = dataclasses.asdict(read.whole(model.num_layers))
    # Each chunk has its own logits.
    return found | {"logits_passes": found["logits_passes"] * chunk / args.tokens}


def compiled(piece: Piece, topology: Topology) -> tuple[str, bool]:
    """Text of a program, and whether its loops are in CUDA graphs."""
    lowered = piece.function.lower(*piece.arguments, **piece.keywords)
    flags = f"{compiler_options(lowered)} {os.environ.get('XLA_FLAGS', '')}"
    found = compile_piece(lowered, topology)
    if not found.fits:
        raise UserError(
            f"a device of {topology.name} is too small: this program needs {found.peak / 1e9:.1f} GB; set "
            "--layers"
        )
    return found.text, "WHILE" in flags and "CONDITIONAL" in flags


def show(line: dict[str, Any], *, as_json: bool, first: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    if first:
        print(f"{line['model']}, {line['layers']} layers, {line['topology']}")
        print(f"{'program':>14}", *(f"{name:>20}" for name in COLUMNS))
    sizes = (
        f"{line[name] / 1e6:17,.1f} MB" if "bytes" in name else f"{line[name]:20,.1f}"
        for name in COLUMNS
    )
    print(f"{line['program'] + ' ' + str(line['rows']):>14}", *sizes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
