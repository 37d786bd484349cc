"""What there is to learn from ten minutes on one accelerator: one line of JSON a check.

    python benchmarks/accelerator.py --part A     roofs, kernels against XLA, same tokens, TF32
    python benchmarks/accelerator.py --part B     a stored executable, the demo
    python benchmarks/accelerator.py --part C     seconds of decoding, updates and a step of Qwen2.5-1.5B
    python benchmarks/accelerator.py --part lm ...   a real model, trained: `carried_lm.py run ...`

    A  versions, roofs, attention_speed, decode_blocks, experts,
       attention_kernels, decode_attention, same_tokens, tf32
    B  executable, demo
    C  decode_blocks, decode, update, step, experts_alone, demo_lm

What is timed comes first. Each part is meant to end within nine minutes on one GPU; a check that would begin
after `--limit_s` is left out and says so. Each is tried for itself: one that fails is a line with its error.
Only jax, flax, optax, pydantic and numpy are needed, no network and no files; the demo is left out where it
lacks a package. On CPU, or with --small, shapes are small and kernels are interpreted: so the script is tried
without an accelerator. Part C has predicted seconds beside the measured ones, by the planner's formula
(docs/planning.md). Where jaxrl is not installed, set PYTHONPATH=.:extensions.

Lines have `check`, `ok` and `seconds`; what else is in them is said at each function. Errors are the largest
difference to float32 by XLA, against the largest of its values.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from jaxrl.errors import UserError
from jaxrl.hub.hub_names import fetched_folder
from jaxrl.mesh import rules
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.hardware import roof_of
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.attention import IMPLEMENTATIONS, attention, pick_implementation
from jaxrl.models.cache.cached_attention import cached_attention
from jaxrl.models.cache.kv_cache import cache_of
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.experts import apply_experts, apply_experts_in_tiles, experts_for
from jaxrl.models.kernels import decode_attention as gpu
from jaxrl.models.kernels import paged_attention as paged
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.shapes import model_shapes
from jaxrl.roles.flops import training_flops
from jaxrl.roles.losses import policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout import engine
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import PackedBatch, Prompts, TrainBatch
from jaxrl_planner.hardware.accelerators import accelerator_of
from jaxrl_planner.hardware.cluster import Cluster
from jaxrl_planner.simulation.assumptions import Assumptions
from jaxrl_planner.simulation.simulate_generation import GenerationSimulator
from jaxrl_planner.simulation.simulate_passes import PassSimulator
from jaxrl_planner.simulation.workload import LengthDistribution, Workload

ROOT = pathlib.Path(__file__).parents[1]
Line = dict[str, Any]
CHECKS: dict[str, list[Callable[..., Any]]] = {"A": [], "B": [], "C": []}
DEMO_PACKAGES = ("grain", "ml_collections", "tokenizers")
TINY = ModelConfig(
    vocab_size=512, num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=16
)
LOSS = policy(
    "clipped", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}, shares_forward=True
)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large a check may be.

    Attributes:
      small: shapes for CPU, whose kernels are interpreted.
      model: that is trained and sampled from.
      dtype: of its activations.
    """

    small: bool
    model: ModelConfig
    dtype: str


def check(part: str):
    """Registers a check; it returns, or yields, what its lines hold."""
    return lambda function: CHECKS[part].append(function) or function


def seconds(function: Callable[..., Any], *args: Any, rounds: int = 5) -> float:
    """The median time of a call, compiled before."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Random numbers made on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def error(value: Any, truth: Any) -> float:
    """The largest difference of any leaf, against the largest of its values."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(value), jax.tree.leaves(truth), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        worst = max(worst, float(np.abs(x - y).max() / np.abs(y).max()))
    return worst


@contextlib.contextmanager
def attempt(line: Line):
    """Adds an error to a line, so that a check goes on with its other cases."""
    try:
        yield
    # Of every kind: what fails is what one wants to know.
    except Exception as failure:
        where = traceback.extract_tb(failure.__traceback__)[-1]
        line["ok"] = False
        line["error"] = f"{type(failure).__name__}: {failure}"[:500]
        line["at"] = f"{where.filename}:{where.lineno}"


# Part A


@check("A")
def versions(scale: Scale):
    """What runs here."""
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "python": platform.python_version(),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        **{name: importlib.metadata.version(name) for name in packages},
    }


@check("A")
def roofs(scale: Scale):
    """TFLOP/s of square matmuls by type, GB/s of a copy (bytes read and written)."""
    n = 512 if scale.small else 8192
    for name, dtype, precision in (
        ("bfloat16", jnp.bfloat16, None),
        ("float32", jnp.float32, "highest"),
        ("float32 as by default", jnp.float32, None),
        ("int8", jnp.int8, None),
    ):
        a, b = (normal(i, n, n, dtype=dtype) for i in range(2))
        out = jnp.int32 if dtype == jnp.int8 else None
        matmul = jax.jit(
            functools.partial(jnp.matmul, precision=precision, preferred_element_type=out)
        )
        yield {"matmul": name, "tflops": 2 * n**3 / seconds(matmul, a, b) / 1e12}
    x = normal(0, 2**20 if scale.small else 2**29)
    copied = seconds(jax.jit(lambda x: x + 1), x)
    yield {"copy_gb_per_s": 2 * x.nbytes / copied / 1e9}


@check("A")
def attention_speed(scale: Scale):
    """TFLOP/s of attention forward and backward, by implementation, length and segments of the row."""
    size, heads, kv_heads = (32, 4, 2) if scale.small else (128, 12, 2)
    for length in (256,) if scale.small else (8192, 32768):
        for segments in (1, 8):
            arrays = _narrow(scale, _attention_inputs(heads, kv_heads, length, size, segments))
            # Causal: half of the scores of each segment, of equal lengths on average; a backward pass is two
            # and a half times a forward one.
            sizes = np.bincount(np.asarray(arrays[3])[0])
            flops = 3.5 * 2 * 2 * heads * size * float(np.square(sizes, dtype=float).sum()) / 2
            for name in _implementations(scale):
                line = {"length": length, "segments": segments, "implementation": name}
                with attempt(line):
                    spent = seconds(_attended(name), *arrays, rounds=3)
                    line |= {"seconds_forward_backward": spent, "tflops": flops / spent / 1e12}
                yield line


def _implementations(scale: Scale) -> list[str]:
    """Implementations of attention that run here."""
    device, found = jax.devices()[0], []
    for name in IMPLEMENTATIONS:
        with contextlib.suppress(UserError):
            found.append(pick_implementation(device.platform, scale.dtype, name, device=device))
    return found


def _narrow(scale: Scale, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [x.astype(scale.dtype) if x.dtype == jnp.float32 else x for x in arrays]


def _attention_inputs(
    heads: int, kv_heads: int, length: int, size: int, segments: int = 3, *, rows: int = 1
):
    q = normal(0, rows, length, heads, size)
    k, v = (normal(i, rows, length, kv_heads, size) for i in (1, 2))
    ids = jnp.sort(jax.random.randint(jax.random.key(3), (rows, length), 1, segments + 1))
    return q, k, v, ids, normal(4, *q.shape)


def _attended(implementation: str, precision: str | None = None):
    """Attention and the gradients of queries, keys and values."""

    @jax.jit
    def run(q, k, v, ids, cotangent):
        with jax.default_matmul_precision(precision or "default"):
            out, pull = jax.vjp(
                lambda *new: attention(
                    *new, ids, implementation=implementation, device=jax.devices()[0]
                ),
                *(q, k, v),
            )
            return out, pull(cotangent)

    return run


def _decode_inputs(rows: int, capacity: int, kv_dtype: Any, scale: Scale, group: int = 6):
    size, kv_heads, layers = (16, 2, 2) if scale.small else (128, 2, 2)
    dtype = jnp.float32 if scale.small else jnp.bfloat16
    q = normal(0, rows, kv_heads * group, size, dtype=dtype)
    k, v = (normal(i, rows, kv_heads, size, dtype=dtype) for i in (1, 2))
    shape = (layers, rows, capacity, kv_heads, size)
    cache = cache_of(normal(3, *shape), normal(4, *shape), kv_dtype, "head_dim")
    return (q, k, v), cache


def _by_kernel(scale: Scale, new: Any, cache: Any, length_B: jax.Array) -> jax.Array:
    # The first token of a dispatch, with an empty buffer; for TPUs with that of both layers.
    (q, k, v), on_tpu = new, jax.default_backend() == "tpu"
    none = jnp.zeros((*[2] * on_tpu, len(q), 16, *k.shape[1:]), k.dtype)
    buffer, used_B = cache_of(none, none, cache.k.dtype, "head_dim"), jnp.zeros(len(q), jnp.int32)
    given = q, cache, jnp.int32(1), length_B, k, v, buffer, used_B
    if on_tpu:
        return paged.paged_attention_tpu(*given, interpret=scale.small)
    return gpu.decode_attention(*given, interpret=scale.small)[0]


def _by_xla(new: Any, cache: Any, length_B: jax.Array) -> jax.Array:
    return cached_attention(*new, [(jax.tree.map(lambda x: x[1], cache), length_B)])


@check("C")
@check("A")
def decode_blocks(scale: Scale):
    """GB/s at which the decode kernel reads the cache, by its constants, beside XLA; of many calls."""
    rows, capacity, calls = (4, 128, 2) if scale.small else (256, 4096, 32)
    kv_dtype = jnp.float32 if scale.small else jnp.bfloat16
    new, cache = _decode_inputs(rows, capacity, kv_dtype, scale)
    length_B = jnp.full(rows, capacity * 3 // 4, jnp.int32)
    read = (
        2 * rows * int(length_B[0]) * cache.v.shape[2] * cache.v.shape[-1] * cache.v.dtype.itemsize
    )

    def rate(attend: Callable[..., jax.Array]) -> float:
        # One program: a single call of .2 ms waits for the host about as long as it runs.
        def run(new, *rest):
            again = lambda _, q: attend((q, *new[1:]), *rest)  # noqa: E731
            return jax.lax.fori_loop(0, calls, again, new[0])

        return calls * read / seconds(jax.jit(run), new, cache, length_B) / 1e9

    for constants in _constants(scale):
        module = paged if jax.default_backend() == "tpu" else gpu
        with mock.patch.multiple(module, **constants):
            yield constants | {"gb_per_s": rate(functools.partial(_by_kernel, scale))}
    yield {"kernel": "xla", "gb_per_s": rate(_by_xla)}


def _constants(scale: Scale) -> list[dict[str, int]]:
    """Constants of the decode kernels to try, those in use first."""
    if jax.default_backend() == "tpu":
        tried = [(512, 32), (256, 32), (1024, 32), (512, 8), (512, 64)]
        return [{"_BLOCK": block, "_MOST_ROWS": rows} for block, rows in tried]
    tried = [(64, 3, 528), (64, 2, 528), (64, 4, 528), (32, 4, 528), (64, 3, 1056), (64, 3, 2112)]
    names = "_BLOCK", "_STAGES", "_PARTS"
    return [dict(zip(names, values, strict=True)) for values in tried[: 1 if scale.small else 6]]


@check("A")
def experts(scale: Scale):
    """The ways to compute a mixture's experts: TFLOP/s forward and with gradients, errors of few tokens."""
    held, width, inner, each = (4, 32, 16, 2) if scale.small else (32, 2048, 768, 8)
    few, tokens = (64, 128) if scale.small else (512, 8192)
    dtype = jnp.float32 if scale.small else jnp.bfloat16
    shapes = {
        "gate": (held, width, inner),
        "up": (held, width, inner),
        "down": (held, inner, width),
    }
    weights = {
        name: {"weight": normal(i, *shape) / shape[1] ** 0.5}
        for i, (name, shape) in enumerate(shapes.items())
    }
    chosen = jax.random.randint(jax.random.key(7), (1, tokens, each), 0, held)
    x, share = normal(8, 1, tokens, width), jax.nn.softmax(normal(9, 1, tokens, each))

    def of(apply: Callable[..., jax.Array], n: int):
        def loss(x, weights):
            return jnp.sum(apply(x, chosen[:, :n], share[:, :n], weights).astype(jnp.float32) ** 2)

        return jax.jit(loss), jax.jit(jax.grad(loss, argnums=(0, 1)))

    with jax.default_matmul_precision("highest"):
        truth = of(apply_experts, few)[1](x[:, :few], weights)
    x, weights = jax.tree.map(lambda a: a.astype(dtype), (x, weights))
    flops = 3 * 2 * tokens * each * width * inner
    ways = {
        "tiled": apply_experts_in_tiles,
        "chosen": experts_for(jax.devices()[0], dtype),
        "grouped": apply_experts,
    }
    for way, apply in ways.items():
        forward, gradient = of(apply, tokens)
        line: Line = {"way": way}
        with attempt(line):
            line["error"] = error(of(apply, few)[1](x[:, :few], weights), truth)
            line["tflops_forward"] = flops / seconds(forward, x, weights) / 1e12
            line["tflops_with_gradients"] = 3 * flops / seconds(gradient, x, weights) / 1e12
        yield line


@check("A")
def attention_kernels(scale: Scale):
    """Attention of each implementation, forward and backward, against float32 by XLA."""
    shapes = ((1, 12, 2, 1024), (2, 28, 4, 1000), (1, 10, 2, 777))
    for rows, heads, kv_heads, length in ((2, 4, 2, 77),) if scale.small else shapes:
        size = 32 if scale.small else 128
        arrays = _attention_inputs(heads, kv_heads, length, size, rows=rows)
        truth = _attended("xla", "highest")(*arrays)
        for name in _implementations(scale):
            line = {"rows": rows, "heads": [heads, kv_heads], "length": length}
            line["implementation"] = name
            with attempt(line):
                line["error"] = error(_attended(name)(*_narrow(scale, arrays)), truth)
            yield line


@check("A")
def decode_attention(scale: Scale):
    """The decode kernel against XLA at the edges of its blocks, by type of the cache."""
    types = (jnp.float32, jnp.int8) if scale.small else (jnp.bfloat16, jnp.int8)
    capacity = 192 if scale.small else 1088
    length_B = jnp.array([0, 1, 63, 64, 65, 128, capacity - 1, capacity], jnp.int32)
    for kv_dtype in types:
        new, cache = _decode_inputs(len(length_B), capacity, kv_dtype, scale)
        wide = [x.astype(jnp.float32) for x in new]
        with jax.default_matmul_precision("highest"):
            truth = jax.jit(_by_xla)(wide, cache, length_B)
        kernel = jax.jit(functools.partial(_by_kernel, scale))(new, cache, length_B)
        yield {
            "cache": jnp.dtype(kv_dtype).name,
            "error": error(kernel, truth),
            "error_of_xla": error(jax.jit(_by_xla)(new, cache, length_B), truth),
        }


@check("A")
def same_tokens(scale: Scale):
    """Share of tokens that 8 slots and 64 draw alike in float32, before the first that differs."""
    for precision in ("highest",) if scale.small else ("highest", "default"):
        drawn = []
        with jax.default_matmul_precision(precision):
            for slots in (8, 64):
                actor = _sampler(TINY, "float32", slots=slots, response=24)
                drawn.append(_sampled(actor, prompts=16, samples=4).tokens)
        same = [
            int(np.cumprod(a[: len(b)] == b[: len(a)]).sum()) for a, b in zip(*drawn, strict=True)
        ]
        yield {"precision": precision, "same": sum(same) / sum(map(len, drawn[0]))}


@check("A")
def tf32(scale: Scale):
    """The gap between sampler's and trainer's log-probabilities in float32, by precision of matmuls."""
    for precision in ("highest",) if scale.small else ("highest", "default"):
        with jax.default_matmul_precision(precision):
            actor = _sampler(TINY, "float32", slots=16, response=24)
            out = _sampled(actor, prompts=8, samples=4)
            batch = _batch_of(
                [np.concatenate(pair) for pair in zip(_repeated(out), out.tokens, strict=True)], 64
            )
            trained = np.asarray(actor.logprobs(batch)).reshape(-1, 64)
        gap = [
            np.abs(row[len(prompt) : len(prompt) + len(tokens)] - logprob)
            for row, prompt, tokens, logprob in zip(
                trained, _repeated(out), out.tokens, out.rollout_logprob, strict=True
            )
        ]
        gap = np.concatenate(gap)
        yield {"precision": precision, "mean": float(gap.mean()), "max": float(gap.max())}


def _repeated(out: Any) -> list[np.ndarray]:
    return [out.prompts.tokens[i] for i in out.prompt_index_B]


# Part B


@check("B")
def executable(scale: Scale, stored: str):
    """Whether a compiled program that was stored runs: one of this machine, or `--executable FILE`."""
    x = normal(0, 256, 256)
    if stored:
        payload, *trees = pickle.loads(pathlib.Path(stored).read_bytes())
    else:
        compiled = jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(x).compile()
        payload, *trees = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(payload, *trees)
    return {"bytes": len(payload), "value": float(np.asarray(loaded(x))), "stored": stored}


@check("B")
def demo(scale: Scale):
    """The first steps of the demo, from the command."""
    missing = [name for name in DEMO_PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        return {"left_out": f"needs {', '.join(missing)}"}
    settings = {"sft.num_steps": 20, "run.num_steps": 2, "rollout.on_shortage": "fill"}
    command = [sys.executable, "launch/train.py", "--config", "configs/dapo_tiny.py"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command.append(f"--config.run.output={folder}")
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return {
        "ok": ran.returncode == 0,
        "demo_seconds": time.perf_counter() - begun,
        "last": ran.stdout.splitlines()[-1:] or ran.stderr.splitlines()[-3:],
    }


# Part C


@check("C")
def decode(scale: Scale):
    """Seconds and tokens/s of decoding, GB/s of weights and cache read: by rows, weights and CUDA graphs.

    Weights are a list of layers, or a stack that a scan slices. Loops and conditionals are part of CUDA
    graphs, or the host starts their rounds.
    """
    ways = [(True, False), (False, False)]
    if jax.default_backend() == "gpu":
        ways.append((True, True))
    for rows in (4,) if scale.small else (16, 64, 256):
        for listed, graphs in ways:
            line = {"rows": rows, "listed": listed, "graphs": graphs}
            with attempt(line), _compiled(listed=listed, graphs=graphs):
                line |= _decoded(scale, rows)
            yield line


@contextlib.contextmanager
def _compiled(*, listed: bool, graphs: bool):
    """Engines that are made inside have their weights in lists, and loops in CUDA graphs."""
    options = engine._compiler_options
    graph = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUDNN,WHILE,CONDITIONAL"}
    with (
        mock.patch.object(rules, "lists_layers", lambda mesh: listed),
        mock.patch.object(
            engine, "_compiler_options", lambda *of: options(*of) | (graph if graphs else {})
        ),
    ):
        yield


@check("C")
def update(scale: Scale):
    """Seconds, tokens/s, TFLOP/s and MFU of one update on packed rows, and the peak of memory, by remat."""
    # The peak is that of the process: from the smallest to the largest.
    for remat in ("full", "projections", "none"):
        line = {"remat": remat}
        with attempt(line):
            line |= _updated(scale, remat)
        gc.collect()
        yield line


@check("C")
def step(scale: Scale):
    """Seconds of sampling and of the update of a step: 32 prompts, 8 answers of 512 tokens each."""
    prompts, samples, prompt, response = (2, 2, 16, 24) if scale.small else (32, 8, 88, 512)
    slots, length = prompts * samples, 128 if scale.small else 8192
    actor = _sampler(
        *(scale.model, scale.dtype),
        slots=slots,
        response=response,
        prompt=prompt,
        stops=(),
        cache="paged",
        length=length,
        tokens_per_dispatch=16 if scale.small else 64,
    )
    line: Line = {"peak_bytes": None}
    for number in range(2):  # The first one compiles.
        begun = time.perf_counter()
        out = _sampled(actor, prompts=prompts, samples=samples, prompt=prompt, step=number)
        sampled = time.perf_counter()
        whole = [np.concatenate(pair) for pair in zip(_repeated(out), out.tokens, strict=True)]
        each = length // (prompt + response)
        batch = actor.place(_batch_of(whole, length, per_row=each, one_row=True))
        jax.block_until_ready(actor.update(batch, LOSS))
        ended = time.perf_counter()
        line |= {"sampling_seconds": sampled - begun, "update_seconds": ended - sampled}
        line |= {"step_seconds": ended - begun}
    actor.close()
    stats = jax.devices()[0].memory_stats() or {}
    work = _work(prompts, samples, prompt, response, length, 64)
    return (
        line
        | {"peak_bytes": stats.get("peak_bytes_in_use")}
        | {f"predicted_{name}": s for name, s in _predicted(scale, work, slots).items()}
    )


@check("C")
def experts_alone(scale: Scale):
    """`experts` in a process of its own with a limit: a kernel that does not compile ends nothing else."""
    command = [sys.executable, __file__, "--part", "A", "--only", "experts"]
    command += ["--small"] if scale.small else []
    said, ended = _within(command, 60.0)
    return {"ok": ended is not None, "ended": ended, "lines": said}


@check("C")
def demo_lm(scale: Scale):
    """Median seconds of a step's phases where SmolLM2-135M learns (`make demo-lm`), after the first step."""
    missing = [name for name in DEMO_PACKAGES if not importlib.util.find_spec(name)]
    if missing or scale.small or not fetched_folder().is_dir():
        why = (
            "a real model takes minutes on CPU"
            if scale.small
            else "needs the weights: carried_lm.py"
        )
        return {"left_out": f"needs {', '.join(missing)}" if missing else why}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "launch/train.py", "--config", "configs/grpo_smollm2.py"]
        command += ["--config.run.num_steps=6", f"--config.run.output={folder}"]
        said, ended = _within(command, 180.0)
        files = list(pathlib.Path(folder).rglob("metrics.jsonl"))
        rows = [json.loads(row) for file in files for row in file.read_text().splitlines()]
    timed = [row for row in rows if "timing_s/step" in row][1:]
    names = sorted({name for row in timed for name in row if name.startswith("timing_s/")})
    median = {n: statistics.median(row[n] for row in timed if n in row) for n in names}
    return {"ok": ended == 0, **median} | ({} if ended == 0 else {"last": said[-3:]})


def _within(command: list[str], limit_s: float) -> tuple[list[str], int | None]:
    """What a command prints beside this process on its device, and its status; None at the limit."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}
    with tempfile.TemporaryFile("w+") as told:
        try:
            status = subprocess.run(
                *(command,),
                cwd=ROOT,
                env=environment,
                stdout=told,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
        told.seek(0)
        return told.read().splitlines(), status


def _work(
    prompts: int, samples: int, prompt: int, response: int, length: int, dispatch: int
) -> Workload:
    return Workload(
        prompts=prompts,
        samples=samples,
        prompt_lengths=LengthDistribution.exactly(prompt),
        response_lengths=LengthDistribution.exactly(response),
        microbatch_tokens=length,
        tokens_per_dispatch=dispatch,
    )


def _predicted(scale: Scale, work: Workload, slots: int, remat: Any = "full") -> dict[str, float]:
    """Seconds of sampling and of the update of a step by the planner; none for a device it does not know."""
    device = jax.devices()[0]
    kind = accelerator_of(device.device_kind)
    if kind is None:
        return {}
    chunk = TrainConfig().positions_of_logits(scale.model.vocab_size, device.platform)
    assume = Assumptions.on(kind, fixed_slots=True, remat=remat, logits_tokens=chunk)
    cluster, layout = Cluster(kind, (1, 1)), ParallelLayout(1, 1, 1, 1, 1)
    sampling = GenerationSimulator(cluster, work, assume).generation(scale.model, layout, slots)
    training = PassSimulator(cluster, work, assume).training(scale.model, layout)
    return {"sampling_seconds": sampling.total_s, "update_seconds": training.total_s}


def _updated(scale: Scale, remat: str) -> Line:
    rows, length = (2, 128) if scale.small else (1, 8192)
    actor = _actor(scale.model, scale.dtype, rows=rows, length=length, remat=remat)
    actor.init()
    sequence = 64 if scale.small else 1024
    rng = np.random.default_rng(0)
    packed = [
        rng.integers(0, scale.model.vocab_size, sequence).astype(np.int32)
        for _ in range(rows * length // sequence)
    ]
    batch = actor.place(_batch_of(packed, length, per_row=length // sequence))
    spent = seconds(lambda: actor.update(batch, LOSS), rounds=3)
    flops = training_flops(scale.model, np.full(len(packed), sequence)).sum()
    device = jax.devices()[0]
    roof, stats = roof_of(device.device_kind), device.memory_stats() or {}
    work = _work(len(packed), 1, 16, sequence - 16, length, 64)
    predicted = _predicted(scale, work, len(packed), remat if remat == "none" else "full")
    return {
        "tokens": rows * length,
        "update_seconds": spent,
        "predicted_update_seconds": predicted.get("update_seconds"),
        "tokens_per_s": rows * length / spent,
        "tflops": flops / spent / 1e12,
        "mfu": roof and flops / spent / 1e12 / roof.tflops(scale.dtype),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def _decoded(scale: Scale, rows: int) -> Line:
    response = 16 if scale.small else 256
    actor = _sampler(
        *(scale.model, scale.dtype), slots=rows, response=response, stops=(), cache="paged"
    )
    begun = time.perf_counter()
    _sampled(actor, prompts=rows, samples=1)
    first, begun = time.perf_counter() - begun, time.perf_counter()
    out = _sampled(actor, prompts=rows, samples=1, step=1)
    spent = time.perf_counter() - begun
    model, item = scale.model, jnp.dtype(scale.dtype).itemsize
    held = item * sum(x.size for x in jax.tree.leaves(actor.shapes))
    of_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * item
    cached = rows * of_token * (16 + response / 2)
    actor.close()
    predicted = _predicted(scale, _work(rows, 1, 16, response, 8192, 16), rows).get(
        "sampling_seconds"
    )
    return {
        "ms_a_token": 1e3 * spent / response,
        "predicted_ms_a_token": predicted and 1e3 * predicted / response,
        "tokens_per_s": int(out.lengths_B.sum()) / spent,
        "gb_per_s": (held + cached) * response / spent / 1e9,
        "seconds_with_compiling": first,
    }


# What checks are made of


def _actor(
    model: ModelConfig,
    dtype: str,
    *,
    rows: int,
    length: int,
    backend: Any = None,
    remat: Any = None,
) -> Actor:
    mesh = backend.mesh if backend is not None else _mesh()
    small = dtype == "float32"
    return Actor(
        model,
        mesh,
        train=TrainConfig(
            rows=rows,
            row_tokens=length,
            dtype="float32" if small else "bfloat16",
            remat=remat or ("none" if small else "full"),
            logprob_chunk_tokens=min(length, 1024),
        ),
        optim=OptimConfig(),
        temperature=1.0,
        seed=0,
        backend=backend,
    )


def _mesh():
    layout = ParallelLayout.from_config(LayoutConfig(train="1-1-1"))
    return build_mesh(layout, jax.devices()[:1])


def _sampler(
    model: ModelConfig,
    dtype: str,
    *,
    slots: int,
    response: int,
    prompt: int = 16,
    stops=(1,),
    length: int = 64,
    tokens_per_dispatch: int = 16,
    **settings: Any,
) -> Actor:
    """An actor with random weights that is ready to sample, and to learn from rows of `length` tokens."""
    config = EngineConfig(
        slots=slots,
        smallest_bucket=slots,
        prefill_prompts=min(slots, 32),
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        tokens_per_dispatch=tokens_per_dispatch,
        stop_ids=stops,
        dtype="float32" if dtype == "float32" else "bfloat16",
        **settings,
    )
    sampler = Engine(model, decoder_graph(model)[0], _mesh(), config)
    actor = _actor(
        model,
        dtype,
        rows=8 if length == 64 else 1,
        length=length,
        backend=OfflineBackend(sampler, functools.partial(map, str)),
    )
    actor.init()
    return actor


def _sampled(actor: Actor, *, prompts: int, samples: int, prompt: int = 16, step: int = 0):
    rng = np.random.default_rng(0)
    none = ("",) * prompts
    batch = Prompts(
        ids_N=np.arange(prompts),
        tokens=tuple(
            rng.integers(2, actor.model.vocab_size, prompt).astype(np.int32) for _ in none
        ),
        texts=none,
        answers=none,
        sources=none,
    )
    return actor.generate(
        batch, SamplingOptions(num_samples=samples, seed=0, step=step, temperature=1.0)
    )


def _batch_of(
    sequences: list[np.ndarray], length: int, *, per_row: int = 1, one_row: bool = False
) -> TrainBatch:
    """Sequences of at most `length / per_row` tokens in rows of `length`, for one update.

    The rows are one microbatch, or with `one_row` a microbatch each.
    """
    rows = -(-len(sequences) // per_row)
    shape = (1, rows, 1, length) if one_row else (1, 1, rows, length)
    fields = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids")}
    share = length // per_row
    for i, tokens in enumerate(sequences):
        row, first = i // per_row, i % per_row * share
        where = (0, *((row, 0) if one_row else (0, row)), slice(first, first + len(tokens)))
        fields["tokens"][where] = tokens
        fields["positions"][where] = np.arange(len(tokens))
        fields["segment_ids"][where] = i % per_row + 1
    packed = PackedBatch(
        **fields,
        sequence=np.where(fields["segment_ids"], 0, -1).astype(np.int32),
        loss_mask=(fields["positions"] > 0).astype(np.float32),
        num_micro_U=np.full(1, shape[1], np.int32),
    )
    return TrainBatch.of(packed, advantage=np.ones(shape, np.float32))


def lines(function: Callable[..., Any], *args: Any) -> Iterator[Line]:
    """What a check says, and its error as one more line."""
    begun = time.perf_counter()
    name = {"check": function.__name__}
    failed: Line = {}
    with attempt(failed):
        said = function(*args)
        for line in [said] if isinstance(said, dict) else said:
            yield name | {"ok": True, "seconds": round(time.perf_counter() - begun, 1)} | line
    if failed:
        yield name | {"seconds": round(time.perf_counter() - begun, 1)} | failed


def main() -> None:
    """Runs the checks of a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=[*sorted(CHECKS), "lm"], required=True)
    parser.add_argument("--only", nargs="*", help="some checks, by their functions' names")
    parser.add_argument("--limit_s", type=float, default=480, help="no check begins after it")
    parser.add_argument("--small", "--tiny", action="store_true", help="shapes for CPU")
    parser.add_argument("--executable", default="", help="a program stored on another machine")
    args, rest = parser.parse_known_args()
    if args.part == "lm":
        # In a process of its own, before this one takes the device.
        command = [sys.executable, str(ROOT / "benchmarks" / "carried_lm.py"), "run", *rest]
        sys.exit(subprocess.run(command, check=False).returncode)
    if rest:
        parser.error(f"{' '.join(rest)}: only --part lm has further arguments")
    small = args.small or jax.default_backend() == "cpu"
    model = TINY if small else model_shapes("qwen2.5-1.5b")
    scale = Scale(small, model, "float32" if small else "bfloat16")
    begun = time.perf_counter()
    for function in CHECKS[args.part]:
        if args.only and function.__name__ not in args.only:
            continue
        if time.perf_counter() - begun > args.limit_s:
            print(json.dumps({"check": function.__name__, "ok": False, "left_out": "no time"}))
            continue
        arguments = (args.executable,) if function is executable else ()
        for line in lines(function, scale, *arguments):
            print(json.dumps(line), flush=True)
        gc.collect()  # Training states of 1.5B do not fit beside each other.


if __name__ == "__main__":
    main()
