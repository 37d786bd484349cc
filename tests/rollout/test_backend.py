"""The contract of rollout backends, kept by our engine and by the fake alike; and how configs name them."""

import functools

import jax
import numpy as np
import pytest
from beside import of_extension
from meshes import mesh_of
from tokens import prompts_of

from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout import drivers
from jaxrl.rollout.backend import RolloutBackend, SamplingOptions
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.settings import EngineConfig, EngineSettings
from jaxrl.types import Completions, Prompts

ServeConfig = of_extension("jaxrl_serving.serve_config:ServeConfig")

MODEL = ModelConfig(
    vocab_size=16, num_layers=1, d_model=8, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=4
)
CONFIG = EngineConfig(
    slots=4,
    prefill_prompts=2,
    max_prompt_tokens=6,
    max_response_tokens=8,
    tokens_per_dispatch=2,
    stop_ids=(1, 2, 3),
)
ARITHMETIC = "arithmetic_backend:build_arithmetic_backend"
OPTIONS = SamplingOptions(num_samples=3, seed=0, step=5, temperature=1.0)
PROMPTS = prompts_of(*(np.arange(4, 4 + n) for n in (1, 6, 3, 2)), ids=[4, 0, 7, 2])


@functools.cache
def loaded(driver) -> RolloutBackend:
    backend = drivers.build_backend(
        driver, MODEL, mesh_of(), CONFIG, lambda sequences: [str(t.tolist()) for t in sequences]
    )
    backend.load(init_params(MODEL, jax.random.key(0)))
    return backend


@pytest.fixture(params=["offline", ARITHMETIC], ids=["engine", "arithmetic"])
def backend(request) -> RolloutBackend:
    return loaded(request.param)


def by_prompt(completions: Completions) -> dict[int, list[list[int]]]:
    """Prompt id -> tokens of its samples."""
    G = completions.num_samples
    return {
        int(i): [t.tolist() for t in completions.tokens[n * G : (n + 1) * G]]
        for n, i in enumerate(completions.prompts.ids_N)
    }


def test_a_batch_is_in_order_and_whole(backend):
    completions = backend.generate(PROMPTS, OPTIONS)
    assert completions.prompts.ids_N.tolist() == PROMPTS.ids_N.tolist()
    assert len(completions) == 4 * 3
    for b, (tokens, logprob) in enumerate(
        zip(completions.tokens, completions.rollout_logprob, strict=True)
    ):
        assert 0 < len(tokens) == len(logprob) <= 8
        assert (tokens[-1] in CONFIG.stop_ids) != completions.truncated_B[b]
        assert completions.texts[b] == str(tokens.tolist())
    assert by_prompt(backend.generate(PROMPTS, OPTIONS)) == by_prompt(completions)


def test_groups_are_handed_out_once_each_as_they_are_finished(backend):
    groups = []
    completions = backend.generate(PROMPTS, OPTIONS, on_group=groups.append)
    assert sorted(int(i) for g in groups for i in g.prompts.ids_N) == sorted(PROMPTS.ids_N.tolist())
    again = Completions.concatenate(
        sorted(groups, key=lambda g: PROMPTS.ids_N.tolist().index(int(g.prompts.ids_N[0])))
    )
    assert by_prompt(again) == by_prompt(completions) and again.texts == completions.texts
    # Nobody can stop a generation that goes to its end.
    whole = backend.generate(PROMPTS, OPTIONS, on_group=lambda group: True)
    assert by_prompt(whole) == by_prompt(completions)


def test_prompts_that_are_drawn_as_slots_fall_free_get_the_same_samples(backend):
    whole = by_prompt(backend.generate(PROMPTS, OPTIONS))
    left, asked = list(range(1, 4)), []

    def more(places, unfinished):
        asked.append((places, unfinished))
        return PROMPTS.take([left.pop(0)] if left else [])

    rollout = backend.resume(PROMPTS.take([0]), OPTIONS, more=more)
    assert by_prompt(rollout.completions) == whole
    assert not left and len(asked) > 3
    # It is not asked while all slots are busy and enough samples wait.
    assert all(0 < places <= 4 + 2 and unfinished <= 4 + 2 for places, unfinished in asked)
    # What is drawn before there is enough goes on later, and what is not drawn is still there.
    left[:] = [1, 2, 3]
    part = backend.resume(PROMPTS.take([0]), OPTIONS, more=more, on_group=lambda group: True)
    last = backend.resume(PROMPTS.take(left), OPTIONS, unfinished=part.unfinished)
    assert by_prompt(part.completions) | by_prompt(last.completions) == whole


def test_a_drawn_prompt_that_cannot_be_sampled_is_refused(backend):
    long = Prompts(np.array([9]), (np.zeros(7, np.int32),), *(("",) for _ in range(3)))
    with pytest.raises(UserError, match="prompt 9 has 7 tokens; the engine takes 1 to 6"):
        backend.resume(PROMPTS.take([]), OPTIONS, more=lambda places, unfinished: long)


@pytest.mark.parametrize("how", ["enough", "budget"])
def test_what_is_left_goes_on_to_the_same_samples(backend, how):
    whole = by_prompt(backend.generate(PROMPTS, OPTIONS))
    stop = {"on_group": lambda group: True} if how == "enough" else {}
    options = OPTIONS.replace(budget_tokens=3) if how == "budget" else OPTIONS
    part = backend.resume(PROMPTS.take([0, 1, 2]), options, **stop)
    assert len(part.unfinished.prompts) > 0
    assert len(part.prompt_indices) == len(part.completions.prompts)
    found = by_prompt(part.completions)
    last = backend.resume(PROMPTS.take([3]), OPTIONS.replace(step=6), unfinished=part.unfinished)
    assert not len(last.unfinished.prompts)
    # Of the new step are the new prompt's samples, and with them their keys.
    again = backend.generate(PROMPTS.take([3]), OPTIONS.replace(step=6))
    found |= by_prompt(last.completions)
    assert found == whole | by_prompt(again)
    versions = {int(v) for version in last.completions.version for v in version}
    assert versions == {5, 6} if how == "budget" else 6 in versions


def test_it_gives_back_the_weights_it_was_given(backend):
    weights = backend.unload()
    assert weights is not None and backend.unload() is None
    backend.load(weights)
    assert jax.tree.leaves(weights)[0].dtype == backend.dtype
    backend.close()


def test_what_cannot_be_sampled_is_refused(backend):
    long = Prompts(np.array([9]), (np.zeros(7, np.int32),), *(("",) for _ in range(3)))
    with pytest.raises(UserError, match="prompt 9 has 7 tokens; the engine takes 1 to 6"):
        backend.generate(long, OPTIONS)
    part = backend.resume(PROMPTS, OPTIONS.replace(budget_tokens=1))
    with pytest.raises(UserError, match=r"unfinished groups have 3 samples each .* num_samples 2"):
        backend.resume(PROMPTS, OPTIONS.replace(num_samples=2), unfinished=part.unfinished)


# Names


def test_drivers_that_are_not_there_are_refused():
    with pytest.raises(UserError, match=r"rollout\.driver 'vllm' is not one of offline, jetstream"):
        drivers.check_driver("vllm", frozenset())
    with pytest.raises(UserError, match=r"rollout\.driver 'jaxrl\.types:none' is not there"):
        drivers.check_driver("jaxrl.types:none", frozenset())


def test_a_driver_says_what_it_cannot_do():
    wanted = frozenset({drivers.PARTIAL})
    drivers.check_driver("offline", wanted)
    with pytest.raises(
        UserError, match=r"'jetstream' cannot do rollout\.max_staleness; use .*'offline'"
    ):
        drivers.check_driver("jetstream", wanted)
    with pytest.raises(UserError, match=r"'jetstream' cannot do rollout\.cache='paged'"):
        drivers.check_driver("jetstream", frozenset({drivers.PAGED}))
    with pytest.raises(UserError, match=r"'jetstream' cannot do train\.replay_routes; use"):
        drivers.check_driver("jetstream", frozenset({drivers.REPLAY}))


# Settings


def test_settings_of_the_engine_are_those_of_every_config_that_has_one():
    """One home: whatever is added to `EngineSettings` can be set for training and for serving."""
    defaults = EngineSettings().engine_settings()
    assert RolloutConfig().engine_settings() == defaults
    server = ServeConfig(model="somewhere", kv_dtype="int8").engine_settings()
    assert server.keys() == defaults.keys() and server["kv_dtype"] == "int8"
    config = EngineConfig(
        **RolloutConfig(dtype="bfloat16").engine_settings(slots=3),
        max_prompt_tokens=1,
        max_response_tokens=1,
        stop_ids=(),
    )
    assert (config.slots, config.dtype) == (3, "bfloat16")
