"""A tiny engine over bytes, for whatever samples from one: its weights, prompts and options."""

import dataclasses
import functools

import jax
import numpy as np
from closeness import assert_close
from meshes import mesh_of
from model_sizes import sized_model
from tokens import prompts_of

from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Completions, Prompts

MODEL = sized_model(288, 2, 16, 32, 4, 2, 8, num_tokens=258)
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


def random_weights(model: ModelConfig, scale: float = 0.3):
    """The same float32 weights each time."""
    _, shapes, _ = decoder_graph(model)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: (scale * rng.normal(size=s.shape)).astype(np.float32), shapes)


@functools.cache
def weights():
    return random_weights(MODEL)


@functools.cache
def engine_of(layout=("1-1-1",), *, base=CONFIG, model=MODEL, **changes) -> Engine:
    """An engine like `base` but for `changes`, on the devices of a layout: train, generate, fsdp."""
    names = dict(zip(("train", "generate", "fsdp"), layout, strict=False))
    config = dataclasses.replace(base, **changes)
    return Engine(model, decoder_graph(model)[0], mesh_of(**names), config)


def encode(text) -> np.ndarray:
    return np.array(list(text.encode()), np.int32)


def decode(tokens) -> str:
    return bytes(t for t in np.asarray(tokens).tolist() if t < 240).decode("utf-8", "replace")


LENGTHS = (1, 20, 7, 24, 3)
rng = np.random.default_rng(1)
PROMPTS = prompts_of(*(rng.integers(3, 256, n) for n in LENGTHS), ids=[3, 0, 7, 1, 2])
OPTIONS = SamplingOptions(num_samples=1, seed=7, step=3, temperature=0.5)


def loaded(kind, *layout):
    """A backend of that kind around the engine, with its weights."""
    backend = kind(engine_of(*[layout] if layout else []), functools.partial(map, decode))
    backend.load(weights())
    return backend


# Layouts of training and generation, and the training layout's fsdp.
LAYOUTS = {
    "one device": ("1-1-1",),
    "replicas and heads": ("1-4-2", "1-2-2-2", 2),
    "replicas": ("1-1-8",),
    "stages": ("2-2-2", "2-2-1-2", 1),
}


def placed(params, model, mesh):
    """Weights of a model where a sampler on the mesh has them."""
    _, shapes, axes = decoder_graph(model)
    return jax.device_put(params, shardings(axes, shapes, GENERATE_RULES, mesh))


@functools.cache
def spread(layout=("1-1-1",), *, model=MODEL, **changes) -> OfflineBackend:
    """A backend around such an engine, with its weights."""
    engine = engine_of(layout, model=model, **changes)
    backend = OfflineBackend(engine, functools.partial(map, decode))
    backend.load(placed(weights(), model, engine.mesh))
    return backend


def resumed(backend: OfflineBackend, prompts: Prompts, options: SamplingOptions) -> Completions:
    """Samples to their end, in steps of a budget of tokens, in the order of the prompts' ids."""
    rest, parts = backend.resume(prompts, options), []
    while len(rest.unfinished.prompts):
        parts.append(rest.completions)
        options = options.replace(step=options.step + 1)
        rest = backend.resume(prompts.take([]), options, unfinished=rest.unfinished)
    whole = Completions.concatenate([*parts, rest.completions])
    return whole.take(np.argsort(whole.prompts.ids_N))


def assert_same_samples(a: Completions, b: Completions):
    """The same tokens, and float values up to rounding."""
    assert [t.tolist() for t in a.tokens] == [t.tolist() for t in b.tokens]
    np.testing.assert_array_equal(a.truncated_B, b.truncated_B)
    for field in ("rollout_logprob", "entropy", "mask"):
        for x, y in zip(getattr(a, field), getattr(b, field), strict=True):
            assert_close(x, y, err_msg=field, scale=1)
