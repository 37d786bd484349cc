"""Samples of several adapters in one loop are those of models with one adapter each in their weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_engine import CONFIG, LAYOUTS, MODEL, OPTIONS, decode, engine_of, spread, weights
from closeness import assert_close
from flax import nnx
from test_live_loop import Heard, drain

from jaxrl.mesh.rules import GENERATE_RULES, shardings
from jaxrl.models import lora
from jaxrl.models.compute import Compute
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.model_config import LoraConfig
from jaxrl.rollout.live_loop import LiveLoop, Request
from jaxrl.rollout.stop_strings import StopSearch

PLACES, RANK = 3, 4
RANKED = dataclasses.replace(MODEL, lora=LoraConfig(rank=RANK, alpha=float(RANK)))
BASE = dataclasses.replace(CONFIG, max_response_tokens=12, prefill_chunk_tokens=9)
rng = np.random.default_rng(5)
# Two pages of 16 tokens are full, but for the last token.
PROMPT = rng.integers(3, 240, 24).astype(np.int32)


@functools.cache
def adapter(number: int):
    """Adapters of full rank that change much; 0 changes nothing."""
    like, rng = lora.split(decoder_graph(RANKED)[1])[0], np.random.default_rng(number)
    size = 0.3 if number else 0.0
    return jax.tree.map(lambda s: jnp.asarray(size * rng.normal(size=s.shape), jnp.float32), like)


def loop_of(layout, **changes):
    """A loop with a stack of adapters, all empty, and where adapters are."""
    engine = engine_of(layout, base=BASE, model=RANKED, adapter_places=PLACES, **changes)
    _, shapes, axes = decoder_graph(RANKED)
    like, _ = lora.split(shapes)
    where, base_where = lora.split(shardings(axes, shapes, GENERATE_RULES, engine.mesh))
    stack = jax.device_put(lora.empty_stack(like, PLACES, jnp.float32), lora.stack_shardings(where))
    base = jax.device_put(weights(), base_where)
    return LiveLoop(engine, lora.join(stack, base), StopSearch(decode)), stack, engine


@functools.cache
def alone(number: int, prompt: bytes, seed: int):
    """(tokens, log-probabilities) of the model with an adapter merged into its weights."""
    params = lora.merge(lora.join(adapter(number), jax.tree.map(jnp.asarray, weights())), RANKED)
    engine = spread(base=BASE).engine
    live, heard = LiveLoop(engine, params, StopSearch(decode)), Heard()
    tokens = np.frombuffer(prompt, np.int32)
    live.submit(Request(tokens, 12, seed, OPTIONS), heard)
    drain(live)
    return heard.joined("tokens").tolist(), heard.joined("logprob")


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (LAYOUTS["one device"], {"cache": "paged", "unroll": 1}),
        pytest.param(LAYOUTS["one device"], {}, marks=pytest.mark.long),
        pytest.param(LAYOUTS["replicas and heads"], {"cache": "paged"}, marks=pytest.mark.long),
        pytest.param(LAYOUTS["stages"], {}, marks=pytest.mark.long),
    ],
)
def test_slots_have_adapters_of_their_own(layout, changes, caplog):
    live, stack, engine = loop_of(layout, **changes)
    put = jax.jit(lora.put_into)
    heard = {}

    def ask(number, prompt, seed):
        heard[number, prompt.tobytes(), seed] = listener = Heard()
        live.submit(Request(prompt, 12, seed, OPTIONS, number), listener)

    # Numbers 1 and 2 are at their places, 3 + 1 comes to the place of 1 while 2 decodes.
    for number in (1, 2):
        stack = put(stack, adapter(number), number % PLACES)
    live.load_adapters(stack)
    for seed in (1, 2):
        for number in (0, 1, 2):
            ask(number, PROMPT, seed)
    drain(live)
    ask(2, PROMPT, 3)
    live.turn()
    live.load_adapters(put(stack, adapter(4), 4 % PLACES))
    # The same prompt and a longer one: nothing that adapter 1 has cached is used.
    ask(4, PROMPT, 1)
    ask(4, PROMPT[:20], 1)
    ask(2, PROMPT, 4)
    with jax.log_compiles():
        drain(live)
    assert not [m for m in caplog.messages if "Compiling jit(generate)" in m]
    for (number, prompt, seed), listener in heard.items():
        tokens, logprobs = alone(number, prompt, seed)
        assert listener.joined("tokens").tolist() == tokens, (number, seed)
        assert_close(listener.joined("logprob"), logprobs, scale=1)
    assert len({alone(n, PROMPT.tobytes(), 1)[1].tobytes() for n in (0, 1, 2, 4)}) == 4
    if engine.pages is not None and engine.shards == 1:
        # One prompt of each number, and the last request of number 2 shares a page with those before.
        assert live.counts.known >= 16


def test_places_make_no_difference_to_a_bit():
    """A restart brings adapters to other places."""
    found = []
    for number in (1, 2, 4):
        live, stack, _ = loop_of(LAYOUTS["one device"])
        live.load_adapters(jax.jit(lora.put_into)(stack, adapter(1), number % PLACES))
        heard = Heard()
        live.submit(Request(PROMPT, 12, 1, OPTIONS, number), heard)
        drain(live)
        found.append(heard.joined("logprob").tobytes())
    assert len(set(found)) == 1


def test_the_whole_stack_gives_what_gathered_factors_give():
    """As accelerators decode."""
    like, _ = lora.split(decoder_graph(RANKED)[1])
    stack = lora.empty_stack(like, PLACES, jnp.float32)
    for number in (1, 2):
        stack = lora.put_into(stack, adapter(number), number)
    model = nnx.merge(
        decoder_graph(RANKED)[0], lora.join(stack, jax.tree.map(jnp.asarray, weights()))
    )
    given = {"per_row": None, "live_BT": jnp.ones((4, 1), bool)}

    def hidden(gathers):
        compute = Compute(adapter_B=jnp.array([2, 0, 1, 2]), gathers_adapters=gathers)
        attend = lambda q, k, v, *_: (q + k.mean() + v.mean(), None)  # noqa: E731
        places = jnp.zeros((4, 1), jnp.int32)
        return jax.jit(lambda: model(places + 7, places, attend, compute=compute, **given)[0])()

    assert_close(hidden(False), hidden(True), scale=1)


def test_first_dense_layers_get_new_adapters_too():
    model = dataclasses.replace(
        RANKED,
        num_layers=3,
        num_experts=4,
        experts_per_token=2,
        first_dense_layers=1,
        dense_d_ff=20,
        lora=LoraConfig(rank=RANK, alpha=float(RANK), targets=("q", "o")),
    )
    engine = engine_of(base=BASE, model=model, adapter_places=PLACES)
    like, rest = lora.split(jax.tree.map(lambda s: jnp.zeros(s.shape), decoder_graph(model)[1]))
    empty = lora.empty_stack(like, PLACES, jnp.float32)
    stack = jax.tree.map(jnp.ones_like, empty)
    given = engine.for_decoding(lora.join(empty, rest))
    expected = engine.for_decoding(lora.join(stack, rest))
    jax.tree.map(np.testing.assert_array_equal, engine.with_adapters(stack, given), expected)


def test_latents_go_with_adapters_on_other_projections():
    """The projection from the latents, which all rows multiply with at once, has none."""
    adapters = LoraConfig(rank=RANK, alpha=float(RANK), targets=("q", "k", "o"))
    sizes = {"kv_latent": 6, "q_latent": 5, "rope_dim": 4, "value_dim": 6}
    model = dataclasses.replace(MODEL, num_kv_heads=4, qkv_bias=False, **sizes)
    ranked = lora.with_adapters(model, adapters)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: jnp.asarray(0.3 * rng.normal(size=s.shape), jnp.float32), decoder_graph(ranked)[1]
    )
    own, base = lora.split(params)
    stack = lora.put_into(lora.empty_stack(own, PLACES, jnp.float32), own, 1)
    found = []
    for number, each, changes in (
        (0, lora.merge(params, ranked), {"model": model}),
        (1, lora.join(stack, base), {"model": ranked, "adapter_places": PLACES}),
    ):
        live, heard = LiveLoop(engine_of(base=BASE, **changes), each, StopSearch(decode)), Heard()
        live.submit(Request(PROMPT, 12, 1, OPTIONS, number), heard)
        drain(live)
        found.append(heard)
    assert found[0].joined("tokens").tolist() == found[1].joined("tokens").tolist()
    assert_close(*(heard.joined("logprob") for heard in found), scale=1)
