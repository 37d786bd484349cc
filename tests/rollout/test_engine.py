"""The compiled engine and its driver, together: what comes out for given prompts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import of_extension
from closeness import assert_close
from meshes import mesh_of
from model_sizes import sized_model
from plain_pass import plain_logits
from slow_values import mostly_slow
from tokens import prompts_of

from jaxrl.algos.logprobs import log_softmax_entropy
from jaxrl.errors import UserError
from jaxrl.mesh import rules
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.models.cache.cache_kind import cache_bytes
from jaxrl.models.decoder import decoder_graph
from jaxrl.models.kernels.decode_attention import decode_attention
from jaxrl.models.kernels.paged_attention import KERNELS, paged_attention_tpu
from jaxrl.roles.learner import TrainState
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packing import PackedShape, RowLimits, plan_packing
from jaxrl.roles.policy import Actor
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout import cache_choice
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.decode_state import Assignment
from jaxrl.rollout.driver import OfflineBackend
from jaxrl.rollout.engine import Engine, host_inputs
from jaxrl.rollout.sampling import gumbel_noise, sample_keys, truncation_of
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Completions, PackedBatch, Prompts

sampler_shapes = of_extension("jaxrl_planner.compiled.programs:sampler_shapes")

T, R = 6, 10
MODEL = sized_model(16, 2, 16, 32, 4, 2, 8, num_tokens=14)
BASE = EngineConfig(
    slots=8,
    smallest_bucket=8,
    prefill_prompts=4,
    max_prompt_tokens=T,
    max_response_tokens=R,
    tokens_per_dispatch=4,
    stop_ids=(1, 2),
)
TEMPERATURE = 0.8
SEED = 7


def make_prompts(ids=range(7)) -> Prompts:
    """Prompts whose tokens depend on their id alone; lengths go through 1 to T."""
    drawn = (np.random.default_rng(i).integers(3, MODEL.num_tokens, 1 + i % T) for i in ids)
    return prompts_of(*drawn, ids=list(ids))


PROMPTS = make_prompts()


@functools.cache
def weights(model=MODEL):
    _, shapes, _ = decoder_graph(model)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: (0.3 * rng.normal(size=s.shape)).astype(np.float32), shapes)


@functools.cache
def actor_of(
    train="1-1-1", generate="", fsdp=1, expert=1, *, config=BASE, model=MODEL, first_device=0
) -> Actor:
    """An actor ready to sample; compiled programs are shared by all tests that ask for the same."""
    mesh = mesh_of(train, generate, first=first_device, fsdp=fsdp, expert=expert)
    engine = Engine(model, decoder_graph(model)[0], mesh, config)
    actor = Actor(
        model,
        mesh,
        train=TrainConfig(logprob_chunk_tokens=8),
        optim=OptimConfig(),
        temperature=TEMPERATURE,
        seed=SEED,
        backend=OfflineBackend(engine, functools.partial(map, spell)),
    )
    params = jax.device_put(weights(model), actor.train_shardings)
    actor.state = TrainState(params, (), jnp.int32(0))
    actor.for_sampling()
    return actor


def spell(tokens: np.ndarray) -> str:
    return " ".join(map(str, tokens))


def sample(actor: Actor, prompts=PROMPTS, *, num_samples=3, step=0, **options) -> Completions:
    given = {"seed": SEED, "temperature": TEMPERATURE, **options}
    return actor.generate(prompts, SamplingOptions(num_samples=num_samples, step=step, **given))


@pytest.fixture(scope="module")
def expected() -> Completions:
    return sample(actor_of())


def assert_same(a: Completions, b: Completions) -> None:
    """Equal tokens; log-probabilities and entropies to rounding."""
    assert a.texts == b.texts
    np.testing.assert_array_equal(a.truncated_B, b.truncated_B)
    for field in ("tokens", "rollout_logprob", "entropy"):
        for x, y in zip(getattr(a, field), getattr(b, field), strict=True):
            assert x.dtype == y.dtype
            assert_close(x, y, err_msg=field, scale=1)


def forward(prompt, response) -> np.ndarray:
    return plain_logits(MODEL, weights(), prompt, response, longest=T + R)


def log_probabilities(logits_TV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`log_softmax_entropy` of the logits of a response, in one program for all lengths."""
    padded_RV = np.zeros((R, MODEL.vocab_size), np.float32)
    padded_RV[: len(logits_TV)] = logits_TV
    log_RV, entropy_R = log_softmax_entropy(padded_RV)
    return np.asarray(log_RV)[: len(logits_TV)], np.asarray(entropy_R)[: len(logits_TV)]


def answers(completions: Completions):
    """(prompt tokens, response tokens, logprob, entropy) of each row."""
    for b, n in enumerate(completions.prompt_index_B):
        yield (
            completions.prompts.tokens[n],
            completions.tokens[b],
            completions.rollout_logprob[b],
            completions.entropy[b],
        )


def test_a_batch_exercises_what_the_other_tests_are_about(expected):
    """Some responses stop by themselves, some are cut, and the samples of a prompt differ."""
    assert 0 < expected.truncated_B.sum() < len(expected)
    assert len(set(expected.lengths_B.tolist())) > 3
    assert len(set(expected.texts)) > len(expected) // 2
    assert expected.texts == tuple(spell(tokens) for tokens in expected.tokens)


def test_responses_end_at_the_first_stop_or_at_the_limit(expected):
    for tokens, truncated in zip(expected.tokens, expected.truncated_B, strict=True):
        stops = np.isin(tokens, BASE.stop_ids)
        assert not stops[:-1].any()
        assert truncated == (not stops[-1])
        assert len(tokens) == R if truncated else 1 <= len(tokens) <= R
    # A stop that comes just in time is not truncation; the weights are such that there is one.
    assert (expected.lengths_B[~expected.truncated_B] == R).any()


def test_log_probability_and_entropy_are_those_of_a_plain_forward_pass(expected):
    for prompt, response, logprob, entropy in answers(expected):
        log_TV, entropy_T = log_probabilities(forward(prompt, response) / TEMPERATURE)
        assert_close(logprob, log_TV[np.arange(len(response)), response], scale=1)
        assert_close(entropy, entropy_T, scale=1)


def test_each_token_is_the_gumbel_max_of_its_own_seed_step_prompt_sample_and_position():
    completions = sample(actor_of(), make_prompts([12, 5]), num_samples=3, step=4)
    for b, (prompt, response, *_) in enumerate(answers(completions)):
        n = len(response)
        # Of all R positions, in one program for all lengths.
        prompt_id = jnp.full(R, completions.prompts.ids_N[b // 3], jnp.int32)
        keys_R2 = sample_keys(SEED, jnp.int32(4), prompt_id, jnp.full(R, b % 3, jnp.int32))
        noise_RV = gumbel_noise(keys_R2, jnp.arange(R), MODEL.vocab_size)
        scores_TV = forward(prompt, response) / TEMPERATURE + np.asarray(noise_RV)[:n]
        np.testing.assert_array_equal(response, scores_TV.argmax(-1))


def pack(completions: Completions, shape: PackedShape):
    sequences = [
        np.concatenate([prompt, response]) for prompt, response, *_ in answers(completions)
    ]
    packing = plan_packing([len(s) for s in sequences], shape)
    batch = PackedBatch(
        tokens=packing.pack(sequences, np.int32),
        loss_mask=(packing.fields()["segment_ids"] > 0).astype(np.float32),
        **packing.fields(),
    )
    return packing, batch


@pytest.mark.parametrize("layout", [("1-1-1",), ("1-4-2", "1-2-2-2", 2)], ids=lambda x: x[0])
def test_the_sampler_and_the_trainer_agree_on_every_token(layout, expected):
    actor = actor_of(*layout)
    packing, batch = pack(expected, RowLimits(2, 24, T + R).shape(21, minibatches=3))
    assert (packing.fields()["segment_ids"] > 1).any()
    trainer = packing.unpack(actor.logprobs(actor.place(batch)))
    for (_, response, logprob, _), whole in zip(answers(expected), trainer, strict=True):
        assert_close(whole[-len(response) :], logprob, scale=1)


def test_a_list_of_layers_samples_as_their_stack_does(expected, monkeypatch, caplog):
    """As on GPUs: from weights that train as stacks, and each program is compiled once."""
    monkeypatch.setattr(rules, "lists_layers", lambda mesh: True)
    config = dataclasses.replace(BASE, unroll=1)
    actor = actor_of.__wrapped__("1-4-2", "1-2-2-2", 2, config=config)
    assert len(actor.backend.params["layers"]["mlp"]["up"]["weight"]) == MODEL.num_layers
    assert_same(sample(actor), expected)
    actor.for_training()
    with jax.log_compiles():
        again = sample(actor)
    assert_same(again, expected)
    assert not [message for message in caplog.messages if message.startswith("Compiling")]


@pytest.mark.slow
def test_the_sampler_and_the_trainer_agree_on_every_token_of_a_long_sample():
    """2,000 tokens, through many dispatches and every size of the cache."""
    config = dataclasses.replace(
        BASE, stop_ids=(), max_response_tokens=2000, tokens_per_dispatch=64
    )
    actor = actor_of(config=config)
    long = sample(actor, make_prompts([4]), num_samples=1)
    assert long.lengths_B.tolist() == [2000]
    shape = RowLimits(1, 2048, 2048).shape(1, minibatches=1)
    packing, batch = pack(long, shape)
    trainer = packing.unpack(actor.logprobs(actor.place(batch)))[0][-2000:]
    assert_close(trainer, long.rollout_logprob[0], scale=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 1, "prefill_prompts": 1, "tokens_per_dispatch": 1},
        {
            "slots": 32,
            "smallest_bucket": 32,
            "prefill_prompts": 3,
            "tokens_per_dispatch": 100,
            "max_prompt_tokens": T + 3,
            "unroll": 2,
        },
    ],
    ids=["one at a time", "all at once"],
)
def test_a_sample_does_not_depend_on_how_it_is_run(changes, expected):
    config = dataclasses.replace(BASE, **changes)
    assert_same(sample(actor_of(config=config)), expected)


def test_a_sample_does_not_depend_on_its_company(expected):
    """Other prompts, another order and another number of samples beside it."""
    ids = [5, 40, 2, 33, 0]
    together = sample(actor_of(), make_prompts(ids), num_samples=2)
    for place, prompt in [(0, 5), (2, 2), (4, 0)]:
        for k in range(2):
            mine, theirs = place * 2 + k, prompt * 3 + k
            assert together.texts[mine] == expected.texts[theirs]
            assert_close(together.rollout_logprob[mine], expected.rollout_logprob[theirs], scale=1)


SPREAD = {
    "figure 8, fsdp": ("1-4-2", "1-2-2-2", 2),
    "stages gathered": ("2-2-2", "1-2-2-2", 1),
    "stages, heads gathered": ("2-2-2", "2-1-2-2", 2),
    "stages, as in training": ("2-2-2", "2-2-1-2", 1),
    "more tensor shards than in training": ("1-2-4", "1-4-1-2", 4),
}


@pytest.mark.parametrize(
    "layout",
    mostly_slow(
        SPREAD,
        fast=("figure 8, fsdp",),
        long=("stages, heads gathered", "more tensor shards than in training"),
    ),
)
def test_the_same_tokens_on_eight_devices_as_on_one(layout, expected):
    assert_same(sample(actor_of(*layout)), expected)


@pytest.mark.parametrize("cache", ["contiguous", pytest.param("paged", marks=pytest.mark.long)])
def test_a_pool_of_one_device_stays_on_it(cache, expected):
    """Also if this is not the first device of all, where arrays go that nothing ties to a device."""
    actor = actor_of(config=dataclasses.replace(BASE, cache=cache), first_device=3)
    state = actor.backend.engine.init_decode_state()
    assert {device.id for leaf in jax.tree.leaves(state) for device in leaf.devices()} == {3}
    assert_same(sample(actor), expected)


# Of a size that the kernel of `attend_by_kernel` takes.
OF_KERNEL = dataclasses.replace(MODEL, head_dim=16)


KERNEL_OF = {"paged_gpu": decode_attention, "paged_tpu": paged_attention_tpu}


def attend_by_kernel(monkeypatch, see, name="paged_gpu") -> None:
    """Lets engines take this machine for one with a kernel: interpreted, and it calls `see` with its cache.

    On a float32 cache, though GPUs have none: in bfloat16 a key between two values may round to either in two
    programs, and samples then differ by more than a comparison of float32 allows.
    """

    def kernel(q_BQH, cache, *rest, **options):
        see(cache)
        return KERNEL_OF[name](q_BQH, cache, *rest, interpret=True, **options)

    monkeypatch.setitem(KERNELS, name, kernel)
    monkeypatch.setattr(cache_choice, "platform_of", lambda mesh: name[-3:])
    monkeypatch.setattr(cache_choice, "pick_decode_implementation", lambda *_, **__: name)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    mostly_slow([("1-1-1",), ("2-2-2", "2-2-1-2", 1)], fast=(("1-1-1",),)),
    ids=lambda x: x[0],
)
def test_the_same_tokens_by_a_kernel_as_by_xla(layout, monkeypatch):
    config = dataclasses.replace(BASE, attention="xla", decode_attention="xla")
    by_xla = sample(actor_of(config=config, model=OF_KERNEL), num_samples=1)
    shapes = set()
    attend_by_kernel(monkeypatch, lambda cache: shapes.add(cache.k.shape))
    config = dataclasses.replace(config, decode_attention="auto")
    actor = actor_of(*layout, config=config, model=OF_KERNEL)
    assert_same(sample(actor, num_samples=1), by_xla)
    # One capacity, of whole pages, and one number of slots: the state is allocated once and never moves.
    engine = actor.backend.engine
    assert (engine.cache_sizes, engine.slot_sizes) == ((128,), (8,))
    # Of all layers where there are no stages; else of a layer, a device's slots of a microbatch and its head.
    assert shapes == {(2, 8, 2, 128, 16) if layout == ("1-1-1",) else (1, 2, 1, 128, 16)}


PAGED_ON = {
    "one device": ("1-1-1",),
    "heads on four parts": ("1-4-2", "1-4-1-2", 1),
    "stages": ("2-2-2", "2-2-1-2", 1),
}


@pytest.mark.parametrize("kernel", KERNEL_OF)
@pytest.mark.parametrize("layout", mostly_slow(PAGED_ON, fast=("one device",)))
def test_the_same_tokens_by_a_kernel_that_follows_a_page_table(layout, kernel, monkeypatch):
    """Stages gather their pages and use no kernel."""
    config = dataclasses.replace(BASE, attention="xla", decode_attention="xla")
    by_xla = sample(actor_of(config=config, model=OF_KERNEL), num_samples=1)
    tables = set()
    see = lambda cache: tables.add((cache.pool.k.shape, cache.table.shape))  # noqa: E731
    attend_by_kernel(monkeypatch, see, kernel)
    config = dataclasses.replace(config, decode_attention=kernel, cache="paged", slots=16)
    actor = actor_of(*layout, config=config, model=OF_KERNEL)
    assert_same(sample(actor, num_samples=1), by_xla)
    engine = actor.backend.engine
    assert engine.pages.page_tokens == 16 and engine.slot_sizes == (16,)
    pages, slots = engine.pages.num_pages, 16 // engine.shards
    if layout[0] == "2-2-2":
        assert not tables
    else:
        # Of two kv heads each of four parts has the one that its queries need.
        held, per_slot = 1 if len(layout) > 1 else 2, engine.pages.pages_per_slot
        assert tables == {((2, pages, held, 16, 16), (slots, per_slot))}


WINDOWED = dataclasses.replace(
    MODEL,
    sliding_window=4,
    layer_pattern=("sliding", "full"),
    rope_local_theta=100.0,
    post_norms=True,
    zero_centered_norms=True,
    attention_softcap=4.0,
    logits_softcap=8.0,
)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (("1-1-1",), {"prefill_chunk_tokens": 3}),
        pytest.param(("1-1-1",), {"unroll": 2}, marks=pytest.mark.slow),
        # Stages have layers of different kinds, and heads and slots are split.
        pytest.param(("2-2-2", "2-2-1-2", 1), {}, marks=pytest.mark.long),
    ],
    ids=["one stack, chunks", "layer by layer", "stages"],
)
def test_samplers_and_trainers_of_a_model_with_windows_agree(layout, changes):
    config = dataclasses.replace(BASE, stop_ids=(), **changes)
    actor = actor_of(*layout, config=config, model=WINDOWED)
    sampled = sample(actor, num_samples=1)
    shape = RowLimits(2, 24, T + R).shape(7, minibatches=1)
    packing, batch = pack(sampled, shape)
    trainer = packing.unpack(actor.logprobs(actor.place(batch)))
    for (_, response, logprob, _), whole in zip(answers(sampled), trainer, strict=True):
        # Longer than the window.
        assert len(response) == R
        np.testing.assert_allclose(whole[-R:], logprob, atol=1e-5)


# What a cache may hold beside keys and values of equal layers.
BY_KERNEL = {
    "windows and caps": (WINDOWED, {}),
    "sinks": (
        dataclasses.replace(
            MODEL, attention_sinks=True, sliding_window=4, layer_pattern=("sliding", "full")
        ),
        {"cache": "paged"},
    ),
    "delta layers": (
        dataclasses.replace(
            MODEL,
            num_layers=4,
            layer_pattern=("delta", "full"),
            delta_key_heads=2,
            delta_value_heads=4,
            delta_key_dim=5,
            delta_value_dim=6,
        ),
        {"cache": "paged"},
    ),
    "first dense layers, routes": (
        dataclasses.replace(
            MODEL,
            num_layers=3,
            num_experts=4,
            experts_per_token=2,
            first_dense_layers=1,
            dense_d_ff=8,
        ),
        {"cache": "paged", "keeps_routes": True},
    ),
    "int8": (MODEL, {"cache": "paged", "kv_dtype": "int8"}),
}


@pytest.mark.parametrize("kernel", KERNEL_OF)
@pytest.mark.parametrize("case", mostly_slow(BY_KERNEL, fast=("sinks",), long=BY_KERNEL))
def test_other_attention_by_a_kernel(case, kernel, monkeypatch):
    """That of GPUs with lists of layers: it writes their buffers, and states are lists, too."""
    model, changes = dataclasses.replace(case[0], head_dim=16), case[1]
    if kernel == "paged_tpu" and "kv_dtype" in changes:
        pytest.skip("this kernel has no int8")
    config = dataclasses.replace(
        BASE, attention="xla", decode_attention="xla", stop_ids=(), **changes
    )
    options = {"num_samples": 1, "truncation": truncation_of(top_p=0.9)}
    by_xla = sample(actor_of(config=config, model=model), **options)
    calls = []
    attend_by_kernel(monkeypatch, calls.append, kernel)
    monkeypatch.setattr(rules, "lists_layers", lambda mesh: kernel == "paged_gpu")
    config = dataclasses.replace(config, decode_attention=kernel, unroll=1)
    actor = actor_of(config=config, model=model)
    assert_same(sample(actor, **options), by_xla)
    assert calls and actor.backend.engine.cache.lists_buffers == (kernel == "paged_gpu")


@pytest.mark.long
def test_devices_that_share_a_vocabulary_gather_no_logits():
    """1,152 tokens are 9 times 128 and do not split over 8 devices in pieces of 128."""
    model = dataclasses.replace(MODEL, vocab_size=1152, num_heads=8, num_kv_heads=8, num_tokens=0)
    graph, shapes, axes = decoder_graph(model)
    engine = Engine(model, graph, mesh_of("1-8-1"), BASE)
    sampler, least = sampler_shapes(engine, shapes, axes), jnp.int32(0)
    compiled = engine.generate.lower(sampler.params, sampler.slots, least).compile().as_text()
    assert "f32[8,144]" in compiled
    assert "f32[8,1152]" not in compiled


@pytest.mark.parametrize("unroll", [1, 2], ids=["one stack", "layer by layer"])
def test_the_largest_state_is_described_without_being_allocated(unroll):
    engine = actor_of(config=dataclasses.replace(BASE, unroll=unroll)).backend.engine
    described = engine.abstract_decode_state()
    whole = engine.init_decode_state()
    jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or pytest.fail(), described, whole
    )
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.context.cache))
    assert cache_bytes(engine.cache, BASE.slots, whole.capacity) == cache


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_are_used_for_windows_but_not_for_layers_of_several_sizes(platform, monkeypatch):
    monkeypatch.setattr(cache_choice, "platform_of", lambda mesh: platform)
    model = dataclasses.replace(WINDOWED, head_dim=128)
    choose = functools.partial(
        cache_choice.choose_cache, mesh=mesh_of(), dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16
    )
    assert choose(model).capacity_multiple > 1
    assert choose(model).lists_buffers == (platform == "gpu")
    several = dataclasses.replace(model, attention_softcap=0.0, full_head_dim=32, full_kv_heads=1)
    assert choose(several).kernel is None
    with pytest.raises(UserError, match=r"values of one size only; use auto or xla"):
        choose(several, decode_attention=f"paged_{platform}")


@pytest.mark.parametrize(
    ("cache", "platform", "agent", "warns"),
    [
        ("paged", "cpu", "", True),
        ("paged", "cpu", "shared/calculator.py:agent", False),
        ("paged", "tpu", "", False),
        ("contiguous", "cpu", "", False),
    ],
)
def test_pages_on_cpu_are_warned_about_where_a_user_has_set_them(
    monkeypatch, caplog, cache, platform, agent, warns
):
    monkeypatch.setattr(cache_choice, "platform_of", lambda _: platform)
    cache_choice.warn_of_pages_on_cpu(cache, mesh_of(), agent)
    assert ("set it to contiguous" in caplog.text) == warns


def test_the_step_and_the_prompts_id_enter_the_sample(expected):
    other_step = sample(actor_of(), step=1)
    assert np.mean([a == b for a, b in zip(other_step.texts, expected.texts, strict=True)]) < 0.3
    renamed = dataclasses.replace(PROMPTS, ids_N=PROMPTS.ids_N + 100)
    other_ids = sample(actor_of(), renamed)
    assert np.mean([a == b for a, b in zip(other_ids.texts, expected.texts, strict=True)]) < 0.3


def test_temperature_zero_is_greedy():
    greedy = sample(actor_of(), temperature=0.0, num_samples=2)
    for prompt, response, logprob, _ in answers(greedy):
        logits_TV = forward(prompt, response)
        np.testing.assert_array_equal(response, logits_TV.argmax(-1))
        # Greedy log-probabilities are those of the distribution at temperature 1.
        log_TV, _ = log_probabilities(logits_TV)
        assert_close(logprob, log_TV[np.arange(len(response)), response], scale=1)
    assert greedy.texts[::2] == greedy.texts[1::2]


def test_truncated_samples_keep_the_probabilities_of_the_whole_distribution():
    limits = truncation_of(top_k=2, top_p=1.0, min_p=0.0)
    cut = sample(actor_of(), truncation=limits, num_samples=4)
    ranks = set()
    for prompt, response, logprob, entropy in answers(cut):
        log_TV, entropy_T = log_probabilities(forward(prompt, response) / TEMPERATURE)
        assert_close(logprob, log_TV[np.arange(len(response)), response], scale=1)
        assert_close(entropy, entropy_T, scale=1)
        chosen_T1 = np.take_along_axis(np.asarray(log_TV), response[:, None], axis=1)
        ranks |= set((log_TV > chosen_T1).sum(-1).tolist())
    assert ranks == {0, 1}
    one = truncation_of(top_k=1, top_p=1.0, min_p=0.0)
    greedy = sample(actor_of(), temperature=0.0, num_samples=1)
    assert sample(actor_of(), truncation=one, num_samples=1).texts == greedy.texts


def test_padding_ids_are_never_sampled_however_hot():
    hot = sample(actor_of(), temperature=50.0, num_samples=8)
    seen = set(np.concatenate(hot.tokens).tolist())
    assert seen == set(range(MODEL.num_tokens))


def test_first_tokens_follow_the_models_distribution():
    """Every id is a stop, so each response is one token; chi-square of 2000 of them."""
    config = dataclasses.replace(
        BASE, slots=64, smallest_bucket=64, stop_ids=tuple(range(MODEL.num_tokens))
    )
    many = sample(actor_of(config=config), make_prompts([4]), num_samples=2000)
    assert set(many.lengths_B.tolist()) == {1}
    assert not many.truncated_B.any()
    logits_V = forward(PROMPTS.tokens[4], np.zeros(1, np.int32))[0, : MODEL.num_tokens]
    p_V = np.asarray(jax.nn.softmax(logits_V / TEMPERATURE))
    counts_V = np.bincount(np.concatenate(many.tokens), minlength=MODEL.num_tokens)
    # 13 degrees of freedom: 41 is exceeded once in ten thousand.
    assert ((counts_V - 2000 * p_V) ** 2 / (2000 * p_V)).sum() < 41


def test_without_stop_ids_every_response_fills_the_limit(expected):
    endless = sample(actor_of(config=dataclasses.replace(BASE, stop_ids=(), max_response_tokens=3)))
    assert endless.truncated_B.all()
    assert set(endless.lengths_B.tolist()) == {3}
    # Neither limit nor stops enter the sample itself.
    for cut, whole in zip(endless.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(cut[: len(whole)], whole[:3])


def test_half_precision_rollout_stays_close_to_the_trainer():
    config = dataclasses.replace(BASE, dtype="bfloat16")
    low = sample(actor_of(config=config))
    gaps = []
    for prompt, response, logprob, _ in answers(low):
        log_TV, _ = log_probabilities(forward(prompt, response) / TEMPERATURE)
        gaps.append(logprob - log_TV[np.arange(len(response)), response])
        assert logprob.dtype == np.float32
    gaps = np.abs(np.concatenate(gaps))
    assert 0 < gaps.mean() < 0.05


def test_slots_keep_their_own_limit_and_temperature_while_others_start():
    """The engine by itself: a greedy sample of 9 tokens, and beside it a hot one of 2, twice."""
    engine, params = actor_of().backend.engine, actor_of().backend.params
    greedy = sample(actor_of(), make_prompts([4]), num_samples=1, temperature=0.0)

    def insert(state, slot, limit, temperature):
        tokens_PT = np.zeros((BASE.prefill_prompts, T), np.int32)
        tokens_PT[0, : len(PROMPTS.tokens[4])] = PROMPTS.tokens[4]
        length_P = np.full(BASE.prefill_prompts, len(PROMPTS.tokens[4]), np.int32)
        blank_S = np.zeros(BASE.slots, np.int32)
        source_S = np.where(np.arange(BASE.slots) == slot, 0, -1).astype(np.int32)
        limit_S = np.full_like(blank_S, limit)
        arrays = (tokens_PT, length_P, source_S, blank_S, blank_S, limit_S, blank_S)
        scalars = (np.uint32(0), np.int32(0), np.float32(temperature), np.True_)
        placed = host_inputs(engine.mesh, *arrays, *scalars)
        prefix = engine.prefill(params, *placed[:2])
        return engine.insert(prefix, state, Assignment(*placed[2:7]), *placed[7:], truncation_of())

    said: list[int] = []

    def generate(state):
        state = engine.generate(params, state)
        token_SW, count_S = jax.device_get((state.decoded.token, state.decoded.count))
        said.extend(token_SW[3, : count_S[3]])
        return state

    state = insert(engine.init_decode_state(), 3, limit=9, temperature=0.0)
    for _ in range(2):
        state = generate(insert(state, 5, limit=2, temperature=50.0))
    state = generate(state)
    n = min(9, len(greedy.tokens[0]))
    np.testing.assert_array_equal(said, greedy.tokens[0][:n])
    assert jax.device_get(state.count).tolist() == [0, 0, 0, n, 0, 2, 0, 0]
    assert not jax.device_get(state.active).any()


def test_an_idle_engine_generates_nothing():
    engine, params = actor_of().backend.engine, actor_of().backend.params
    before, after = jax.device_get(
        (engine.init_decode_state(), engine.generate(params, engine.init_decode_state()))
    )
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("layout", [("1-1-1",), ("1-4-2", "1-2-2-2", 2)], ids=lambda x: x[0])
def test_nothing_compiles_twice_over_varied_prompts(layout, caplog):
    actor = actor_of(*layout)
    # A full prefill batch, and a small one.
    sample(actor)
    sample(actor, make_prompts([0]), num_samples=1)
    with jax.log_compiles():
        sample(actor, make_prompts([3]), num_samples=1, step=9)
        sample(actor, make_prompts(range(20, 31)), num_samples=4, temperature=0.0)
    assert not [message for message in caplog.messages if message.startswith("Compiling")]


@pytest.mark.parametrize("length", [0, T + 1])
def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(length):
    tokens = (*PROMPTS.tokens[:6], np.zeros(length, np.int32))
    prompts = dataclasses.replace(PROMPTS, tokens=tokens, ids_N=PROMPTS.ids_N + 500)
    with pytest.raises(
        UserError, match=rf"prompt 506 has {length} tokens; the engine takes 1 to {T}"
    ):
        sample(actor_of(), prompts, num_samples=1)


@pytest.mark.long
def test_a_scan_in_bfloat16_on_cpu_moves_weights_and_cache_without_float32():
    """Slices by way of float32 take several times as long as the matmuls with them."""
    model = dataclasses.replace(MODEL, num_layers=9, d_model=48, d_ff=80, num_kv_heads=4)
    config = dataclasses.replace(
        BASE, dtype="bfloat16", max_response_tokens=37, tokens_per_dispatch=5
    )
    mesh = build_mesh(ParallelLayout(1, 1, 1, 1, 1), jax.devices()[:1])
    graph, shapes, _ = decoder_graph(model)
    engine = Engine(model, graph, mesh, config)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    state = jax.eval_shape(engine.init_decode_state)
    program = engine.generate.lower(params, state, jnp.int32(0)).compile().as_text()
    assert program
    weights = {leaf.shape for leaf in jax.tree.leaves(shapes["layers"]["mlp"])}
    caches = {leaf.shape for leaf in jax.tree.leaves(state.context.cache)}
    assert weights == {(9, 48, 80), (9, 80, 48)} and {shape[0] for shape in caches} == {9}
    buffers = {(9, 8, 4, 8, 5), (9, 8, 4, 5, 8)}
    for shape in weights | {shape[1:] for shape in weights} | caches | buffers:
        size = ",".join(map(str, shape))
        assert f"bf16[{size}]" in program
        assert f"f32[{size}]" not in program, size


@pytest.mark.long
def test_layers_apart_are_copied_once_and_not_per_dispatch():
    engine = actor_of().backend.engine
    params = actor_of().backend.params
    apart = engine.for_decoding(params)
    assert [len(leaf) for leaf in apart["layers"]["mlp"]["up"].values()] == [MODEL.num_layers]
    assert engine.for_decoding(apart) is apart
    scanned = dataclasses.replace(BASE, unroll=1)
    engine_of_scan = Engine(MODEL, decoder_graph(MODEL)[0], engine.mesh, scanned)
    assert engine_of_scan.for_decoding(params) is params
    state = jax.eval_shape(engine.init_decode_state)
    temporary = [
        engine.generate.lower(form, state, jnp.int32(0)).compile().memory_analysis()
        for form in (params, apart)
    ]
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    saved = temporary[0].temp_size_in_bytes - temporary[1].temp_size_in_bytes
    assert saved > 0.8 * layers


def test_the_buffer_of_new_tokens_is_not_copied_for_every_token():
    """XLA on CPU copies a buffer that is written after it was read: keys and values of every layer."""
    engine, params = actor_of().backend.engine, actor_of().backend.params
    state = jax.eval_shape(engine.init_decode_state)
    program = engine.generate.lower(params, state, jnp.int32(0)).compile().as_text()
    assert program
    W, H = BASE.tokens_per_dispatch, MODEL.head_dim
    buffers = [f"f32[{BASE.slots},{MODEL.num_kv_heads},{a},{b}]" for a, b in ((W, H), (H, W))]
    copies = [line for line in program.split("\n") if " copy(" in line]
    of_buffers = [line for line in copies if any(buffer in line for buffer in buffers)]
    # Zeros at the start of the dispatch.
    assert len(of_buffers) <= 2 * MODEL.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_scan_in_bfloat16_samples_as_unrolled_layers_do(kv_dtype):
    model = dataclasses.replace(MODEL, num_layers=9)
    config = dataclasses.replace(BASE, dtype="bfloat16", kv_dtype=kv_dtype)
    unrolled = dataclasses.replace(config, unroll=9)
    tokens, expected = (
        sample(actor_of(config=c, model=model), make_prompts()).tokens for c in (config, unrolled)
    )
    same = sum(np.array_equal(a, b) for a, b in zip(tokens, expected, strict=True))
    assert same >= len(expected) * 3 // 4, f"{same} of {len(expected)}"
