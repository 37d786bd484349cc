"""A tiny engine over bytes, for whatever samples from one: its weights, prompts and options."""

import dataclasses
import functools

import jax
import numpy as np
from closeness import assert_close

from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Completions, Prompts

MODEL = ModelConfig(
    vocab_size=288,
    num_tokens=258,
    num_layers=2,
    d_model=16,
    d_ff=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIG = EngineConfig(
    slots=8,
    smallest_bucket=8,
    prefill_prompts=4,
    max_prompt_tokens=24,
    max_response_tokens=20,
    tokens_per_dispatch=4,
    # Many, so that some samples are short.
    stop_ids=(257, *range(240, 256)),
)


@functools.cache
def weights():
    _, shapes, _ = decoder_graph(MODEL)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: (0.3 * rng.normal(size=s.shape)).astype(np.float32), shapes)


@functools.cache
def engine_of(train="1-1-1") -> Engine:
    layout = ParallelLayout.from_config(LayoutConfig(train=train))
    mesh = build_mesh(layout, jax.devices()[: layout.num_devices])
    return Engine(MODEL, decoder_graph(MODEL)[0], mesh, CONFIG)


def encode(text) -> np.ndarray:
    return np.array(list(text.encode()), np.int32)


def decode(tokens) -> str:
    return bytes(t for t in np.asarray(tokens).tolist() if t < 240).decode("utf-8", "replace")


LENGTHS = (1, 20, 7, 24, 3)
rng = np.random.default_rng(1)
PROMPTS = Prompts(
    ids_N=np.array([3, 0, 7, 1, 2]),
    tokens=tuple(rng.integers(3, 256, n).astype(np.int32) for n in LENGTHS),
    texts=("",) * 5,
    answers=("",) * 5,
    sources=("",) * 5,
)
OPTIONS = SamplingOptions(num_samples=1, seed=7, step=3, temperature=0.5)


def loaded(kind, *layout):
    """A backend of that kind around the engine, with its weights."""
    backend = kind(engine_of(*layout), functools.partial(map, decode))
    backend.load(weights())
    return backend


# Layouts of training and generation, and the training layout's fsdp.
LAYOUTS = {
    "one device": ("1-1-1",),
    "replicas and heads": ("1-4-2", "1-2-2-2", 2),
    "replicas": ("1-1-8",),
    "stages": ("2-2-2", "2-2-1-2", 1),
}


@functools.cache
def spread(layout=("1-1-1",), *, base=CONFIG, model=MODEL, **changes) -> OfflineBackend:
    """A backend on the devices of a layout, around an engine like `base` but for `changes`."""
    names = dict(zip(("train", "generate", "fsdp"), layout, strict=False))
    parallel = ParallelLayout.from_config(LayoutConfig(**names))
    mesh = build_mesh(parallel, jax.devices()[: parallel.num_devices])
    graph, shapes, axes = decoder_graph(model)
    engine = Engine(model, graph, mesh, dataclasses.replace(base, **changes))
    backend = OfflineBackend(engine, functools.partial(map, decode))
    backend.load(jax.device_put(weights(), shardings(axes, shapes, GENERATE_RULES, mesh)))
    return backend


def assert_same_samples(a: Completions, b: Completions):
    """The same tokens, and float values up to rounding."""
    assert [t.tolist() for t in a.tokens] == [t.tolist() for t in b.tokens]
    np.testing.assert_array_equal(a.truncated_B, b.truncated_B)
    for field in ("rollout_logprob", "entropy", "mask"):
        for x, y in zip(getattr(a, field), getattr(b, field), strict=True):
            assert_close(x, y, err_msg=field, scale=1)
