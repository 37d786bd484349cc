"""The fake backend by hand; the contract that it shares with others is tested in tests/rollout."""

import functools

import jax
import numpy as np
import pytest
from arithmetic_backend import ArithmeticBackend

from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import ParallelLayout
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.settings import EngineConfig
from jaxrl.types import Prompts

CONFIG = EngineConfig(
    max_prompt_tokens=4, max_response_tokens=3, tokens_per_dispatch=1, stop_ids=(1,)
)
PROMPT = Prompts(np.array([3]), (np.array([5, 7], np.int32),), *(("",) for _ in range(3)))
OPTIONS = SamplingOptions(num_samples=3, seed=0, step=2, temperature=1.0)


def backend_of(respond=None) -> ArithmeticBackend:
    mesh = build_mesh(ParallelLayout(1, 1, 1, 1, 1), jax.devices()[:1])
    return ArithmeticBackend(
        mesh, CONFIG, functools.partial(map, lambda t: " ".join(map(str, t))), respond
    )


def test_it_counts_on_from_the_prompt():
    found = backend_of().generate(PROMPT, OPTIONS)
    assert found.texts == ("8 1", "8 9 1", "8 9 10")
    assert found.truncated_B.tolist() == [False, False, True]
    np.testing.assert_allclose(found.rollout_logprob[1], [-1, -1 / 2, -1 / 3])
    assert found.entropy[2].tolist() == [1, 1, 1]


def test_a_budget_is_kept_and_added_to():
    backend = backend_of()
    part = backend.resume(PROMPT, OPTIONS.replace(budget_tokens=2))
    assert [s.tokens.tolist() for s in part.unfinished.samples] == [[8, 1], [8, 9], [8, 9]]
    rest = backend.resume(PROMPT.take([]), OPTIONS.replace(step=4), unfinished=part.unfinished)
    assert rest.completions.texts == ("8 1", "8 9 1", "8 9 10")
    assert rest.completions.version[1].tolist() == [2, 2, 4]


def test_responses_of_ones_own():
    found = backend_of(lambda prompt, k: prompt[: k + 1]).generate(PROMPT, OPTIONS)
    assert found.texts == ("5", "5 7", "5 7") and found.truncated_B.all()


def test_it_says_what_it_cannot_do():
    with pytest.raises(UserError, match="knows no stop strings"):
        backend_of().generate(PROMPT, OPTIONS.replace(stop_strings=("a",)))
