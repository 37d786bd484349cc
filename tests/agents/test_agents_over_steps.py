"""Sessions that stay open over steps: versions of their tokens, staleness, checkpoints."""

import contextlib
import json

import jax
import numpy as np
import pytest
from agent_runs import OPTIONS, agent_backend, problems
from plain_pass import plain_logprobs
from test_agent_backend import conversations, said

from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.types import Prompts

NONE = Prompts.concatenate([])
# Agents of several lengths, so that some are open when the first group has ended.
KINDS = ["talk", "long", "threads", "long"]


@pytest.fixture
def backend():
    backend = agent_backend()
    yield backend
    backend.close()


def first_group(group) -> bool:
    return True


def through_json(record):
    """A record as a checkpoint gives it back."""
    plain = json.dumps(record, default=lambda array: array.tolist())
    arrays = {name: x.dtype for name, x in record.items() if isinstance(x, np.ndarray)}
    return {
        name: np.array(x, arrays[name]) if name in arrays else x
        for name, x in json.loads(plain).items()
    }


def other_weights(params):
    return jax.tree.map(lambda x: x * 1.1, params)


def test_every_token_has_the_version_of_the_weights_that_sampled_it(backend):
    prompts = problems(KINDS, nap_s=0.05)
    params = {3: backend.inner.params}
    first = backend.resume(prompts, OPTIONS, on_group=first_group)
    assert len(first.completions.prompts) >= 1 and len(first.unfinished.prompts) >= 1
    assert all((v == 3).all() for v in first.versions)
    params[4] = other_weights(backend.unload())
    backend.load(params[4])
    second = backend.resume(NONE, OPTIONS.replace(step=4), unfinished=first.unfinished)
    assert len(second.unfinished.prompts) == 0
    assert first.unfinished.oldest_version_N.tolist() == [3] * len(first.unfinished.prompts)
    versions = np.concatenate(second.versions)
    assert {*versions.tolist()} == {3, 4}
    # All of them have the keys of the step in which they began.
    assert {*second.completions.started_B.tolist()} == {3}
    model = backend.inner.engine.model
    mixed = 0
    for b in range(len(second.completions)):
        for talk in conversations(second.completions, b):
            start = int(np.argmax(talk.mask))
            prompt, response = talk.tokens[:start], talk.tokens[start:]
            own = talk.mask[start:] > 0
            of_version = {
                v: plain_logprobs(model, p, prompt, response, longest=256, temperature=1.0)[own]
                for v, p in params.items()
            }
            ours = talk.rollout_logprob[start:][own]
            near = {v: np.abs(ours - theirs) < 1e-4 for v, theirs in of_version.items()}
            assert (near[3] | near[4]).all()
            mixed += near[3].any() and not near[3].all()
    assert mixed
    assert second.completions.of_agents.failed_B.sum() == 0


def test_killed_sessions_go_on_from_a_checkpoint_to_the_same_rows(backend):
    prompts = problems(KINDS, nap_s=0.05)
    expected = said(backend.generate(prompts, OPTIONS))
    whole = backend.metrics["agent/sampled_tokens"]
    first = backend.resume(prompts, OPTIONS, on_group=first_group)
    record = through_json(first.unfinished.record())
    with contextlib.closing(agent_backend()) as again:
        later = OPTIONS.replace(step=5)
        saved = UnfinishedGroups.of_record(record)
        rest = again.resume(NONE, later, unfinished=saved)
        # What was answered before is not sampled again.
        sampled = again._live.counts.sampled
    by_id = {
        int(n): rows
        for done in (first.completions, rest.completions)
        for n, *rows in zip(done.prompts.ids_N, said(done)[::2], said(done)[1::2], strict=True)
    }
    assert [rows for n in prompts.ids_N.tolist() for rows in by_id[n]] == expected
    old = sum(int((v == 3).sum()) for v in rest.versions)
    new = sum(int((v == 5).sum()) for v in rest.versions)
    assert old == sum(len(s) for s in saved.samples) > 0 and 0 < new <= sampled < whole
