"""Sessions that stay open over steps: versions of their tokens, staleness, checkpoints."""

import contextlib
import itertools
import json

import jax
import numpy as np
import pytest
from agent_runs import OPTIONS, agent_backend, problems
from plain_pass import plain_logprobs
from recipe_files import write_recipe_file
from test_agent_backend import conversations, said
from test_agent_training import settings_of
from test_multiprocess import FREE, finish, rows_of, start

import jaxrl
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


def sampled_versions(rollout) -> list[np.ndarray]:
    """The versions of the sampled tokens of every conversation."""
    done = rollout.completions
    mains = map(done.branch, range(len(done)))
    everything = itertools.chain(mains, *done.of_agents.branches)
    return [branch.version[branch.mask > 0] for branch in everything]


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


@pytest.mark.long
def test_every_token_has_the_version_of_the_weights_that_sampled_it(backend):
    prompts = problems(KINDS, nap_s=0.05)
    params = {3: backend.inner.params}
    first = backend.resume(prompts, OPTIONS, on_group=first_group)
    assert len(first.completions.prompts) >= 1 and len(first.unfinished.prompts) >= 1
    assert all((v == 3).all() for v in sampled_versions(first))
    groups = backend.lasting.values()
    assert all(g.oldest_version == g.saved().oldest_version_N[0] for g in groups)
    params[4] = other_weights(backend.unload())
    backend.load(params[4])
    # An evaluation, during which open sessions go on.
    backend.generate(problems(["talk"]), OPTIONS.replace(step=2**31 - 1))
    second = backend.resume(NONE, OPTIONS.replace(step=4), unfinished=first.unfinished)
    assert len(second.unfinished.prompts) == 0
    # On a busy machine a session may not have had an answer yet.
    unanswered = np.iinfo(np.int64).max
    assert set(first.unfinished.oldest_version_N.tolist()) - {unanswered} == {3}
    versions = np.concatenate(sampled_versions(second))
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
            ours = talk.logprob[start:][own]
            near = {v: np.abs(ours - theirs) < 1e-4 for v, theirs in of_version.items()}
            assert (near[3] | near[4]).all()
            mixed += near[3].any() and not near[3].all()
    assert mixed
    assert second.completions.finished_B.all()


@pytest.mark.long
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
    old = sum(int((v == 3).sum()) for v in sampled_versions(rest))
    new = sum(int((v == 5).sum()) for v in sampled_versions(rest))
    assert old == sum(len(s) for s in saved.samples) > 0 and 0 < new <= sampled < whole


APART = {
    "placement": {
        "learn": {"roles": ("actor",), "train": "1-1-1"},
        "sample": {"roles": ("rollout",), "train": "1-1-1"},
    },
    "algorithm.correction.weights": "token",
    "optim.lr": 1e-2,
    "optim.lr_warmup_steps": 0,
}
# DAPO on one mesh ends a step when it has enough groups.
TOGETHER = {
    "placement": {"one": {"roles": ("actor",), "train": "1-1-1", "devices": "0-0"}},
    "algorithm.dataflow": "dapo",
    "rollout.keep_groups": "score",
    "rollout.on_shortage": "fill",
    "rollout.generation_prompts": 6,
    "rollout.max_generation_batches": 2,
}


@pytest.mark.long
@pytest.mark.parametrize("where", [APART, TOGETHER], ids=["apart", "together"])
def test_training_goes_on_with_open_sessions_and_from_their_checkpoint(where, tmp_path):
    # Scores that differ, so that every step learns.
    settings = settings_of(tmp_path, {"by_sample": True}, **where) | {
        "rollout.max_staleness": 2,
        "run.save_every": 2,
        "evaluation.every": 3,
        "evaluation.num_samples": 1,
    }
    recipe = write_recipe_file(tmp_path, settings)
    for num_steps in (2, 4):
        rows = jaxrl.train(str(recipe), num_steps=num_steps).to_pylist()
    assert len(rows) == 4 and rows[2]["rollout/unfinished_groups"] > 0
    for row in rows:
        assert row["agent/failed"] == 0 and row["rollout/dropped_stale_groups"] == 0
    assert rows[0]["training/rollout_probs_diff_max"] < 1e-4
    assert max(row["rollout/unfinished_groups"] for row in rows) > 0
    assert max(row["rollout/stale_tokens"] for row in rows) > 0
    assert max(row["training/rollout_probs_diff_max"] for row in rows) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_two_processes_go_on_with_open_sessions_and_from_their_checkpoint(apart, tmp_path):
    """The learner and the sampler have a process each, or both have devices of both."""
    where = {"mesh.train": "1-2-2"} | {k: v for k, v in TOGETHER.items() if k != "placement"}
    if apart:
        where = APART | {"placement": FREE["placement"], "hosts.pools_apart": True}
    settings = settings_of(tmp_path, {"by_sample": True}, **where) | {
        "rollout.max_staleness": 2,
        "run.save_every": 2,
        "run.stop_within_s": 10_000.0,
    }
    recipe = write_recipe_file(tmp_path, settings)
    for num_steps in (2, 4):
        with start([recipe, recipe], f"--config.run.num_steps={num_steps}") as processes:
            finish(processes)
    rows = rows_of(tmp_path, "rl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["rollout/unfinished_groups"] > 0
    for row in rows:
        assert row["agent/failed"] == 0 and row["rollout/dropped_stale_groups"] == 0
    assert max(row["rollout/stale_tokens"] for row in rows) > 0
