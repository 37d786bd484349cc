"""Roles that frozen weights speak: their tokens are those of these weights, and nobody learns from them."""

import contextlib
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from agent_runs import OPTIONS, agent_backend, problems
from chats import chat_tokenizer
from closeness import assert_close
from plain_pass import plain_logprobs
from recipe_files import write_recipe_file
from test_agent_backend import said
from test_agent_roles import DUET, ROLES
from test_agent_training import ONE, settings_of, step_of
from test_agents_over_steps import APART, NONE, other_weights, through_json
from test_multiprocess import run as run_processes
from tiny_runs import MODEL

import jaxrl
from jaxrl import cli
from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.decoder import init_params
from jaxrl.models.huggingface.weight_export import save_adapter, save_checkpoint
from jaxrl.models.model_config import LoraConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.samples import UnfinishedGroups
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl_agents import agent_groups

FROZEN = {
    "rollout.agent": DUET,
    "rollout.agent_roles": ROLES,
    "rollout.frozen_roles.checker": "start",
}


def frozen_backend(**changes):
    """A backend whose checker has the weights of `agent_backend`, and whose solver has others."""
    settings = {"agent": DUET, "agent_roles": ROLES, "frozen_roles": {"checker": "start"}} | changes
    backend = agent_backend(**settings)
    backend.freeze("start", backend.inner.params)
    backend.load(other_weights(backend.inner.params))
    return backend


def saved_model(folder, seed=1, source=None, **shape):
    """A checkpoint of the model of `tiny_runs`, or of another shape."""
    model = dataclasses.replace(MODEL, **shape)
    save_checkpoint(
        init_params(model, jax.random.key(seed)), model, folder, dtype="float32", source=source
    )
    return folder


@pytest.fixture(scope="module")
def backend():
    with contextlib.closing(frozen_backend()) as backend:
        yield backend


@pytest.fixture
def sessions(monkeypatch):
    """The sessions that are made, in that order."""
    made, session = [], agent_groups.Session

    def watched(**fields):
        made.append(session(**fields))
        return made[-1]

    monkeypatch.setattr(agent_groups, "Session", watched)
    return made


def spoken(sessions, role="checker"):
    """The tokens of each session's only conversation of a role."""
    return [tuple(x.conversations[role].branches()[0].tokens.tolist()) for x in sessions]


def test_a_frozen_role_says_what_its_weights_say_and_makes_no_groups(backend, sessions):
    # Both roles read the same problem here, so the checker's answers do not depend on the solver's.
    with contextlib.closing(agent_backend(agent=DUET, agent_roles=ROLES)) as plain:
        expected = said(plain.generate(problems(["same"]), OPTIONS))
    sessions.clear()
    done = backend.generate(problems(["same"]), OPTIONS)
    assert done.prompts.sources == ("tests/solver",) and len(done) == 2
    ours = sessions[:]
    assert spoken(ours) == [x[0] for x in expected[2:]]
    assert spoken(ours, "solver") == [x[0] for x in said(done)] != [x[0] for x in expected[:2]]
    metrics = backend.metrics
    own = [sum(branch.mask.sum() for branch in x.conversations["checker"].branches()) for x in ours]
    assert metrics["agent/checker/sampled_tokens/mean"] == np.mean(own)
    assert metrics["agent/checker/score/mean"] == 0.5 == metrics["agent/solver/score/mean"]
    # No program of another size or another set of weights.
    engine = backend.inner.engine
    compiled = engine.generate._cache_size(), engine.prefill._cache_size()
    before = backend.inner.params
    backend.load(jax.tree.map(lambda x: 2 * x, before))
    later = backend.generate(problems(["same"]), OPTIONS)
    assert spoken(sessions[-2:]) == spoken(ours) and said(later) != said(done)
    assert compiled == (engine.generate._cache_size(), engine.prefill._cache_size())
    backend.load(before)


def test_a_frozen_role_needs_no_score_and_no_answer(backend):
    for kind in ("lacks", "alone"):
        done = backend.generate(problems([kind]), OPTIONS)
        assert done.finished_B.all(), kind
    assert "agent/checker/sampled_tokens/mean" not in backend.metrics


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"frozen_roles": {"judge": "start"}},
            "names judge, and agent_roles are solver, checker; add",
        ),
        (
            {"agent_roles": (), "frozen_roles": {"judge": "start"}},
            "agent_roles are empty; add it there",
        ),
        ({"frozen_roles": dict.fromkeys(ROLES, "start")}, "so nothing would learn; take one"),
    ],
)
def test_frozen_roles_that_cannot_be(changes, said):
    with pytest.raises(ValueError, match=said):
        RolloutConfig(**({"agent": DUET, "agent_roles": ROLES} | changes))


def test_num_prompts_counts_groups_of_the_roles_that_learn():
    three = RolloutConfig(
        agent=DUET, agent_roles=("a", "b", "c"), frozen_roles={"b": "start"}, max_staleness=2
    )
    assert three.learning_roles == ("a", "c")
    assert three.weights_of_roles == {"a": "", "b": "start", "c": ""}
    three.check_roles(32, "")
    with pytest.raises(UserError, match=r"has 33 groups .* every problem gives 2"):
        three.check_roles(33, "")


@pytest.mark.long
def test_a_frozen_role_goes_on_over_a_step_and_from_a_checkpoint(backend, sessions):
    """Its answers before the restart are known again, and have no age."""
    prompts = problems(["soon", "later"])
    expected = said(backend.generate(prompts, OPTIONS))
    checked = spoken(sessions)
    first = backend.resume(prompts, OPTIONS, on_group=lambda group: True)
    saved = UnfinishedGroups.of_record(through_json(first.unfinished.record()))
    assert len(saved.samples) == 2 and saved.oldest_version_N.tolist() == [3]
    with contextlib.closing(frozen_backend()) as again:
        again.load(backend.inner.params)
        rest = again.resume(NONE, OPTIONS.replace(step=4), unfinished=saved)
    assert said(first.completions) + said(rest.completions) == expected
    assert spoken(sessions[-2:]) == checked[2:]


def test_a_folder_of_another_model_or_none_is_refused_before_anything_compiles(tmp_path):
    settings = settings_of(tmp_path, **ONE, **FROZEN) | {"rollout.num_prompts": 2}
    for shape, told in (({"d_ff": 96}, "model.d_ff 96, and the policy 64;"), (None, "nowhere")):
        folder = tmp_path / "nowhere"
        if shape:
            folder = saved_model(tmp_path / "other", **shape)
        changes = {"rollout.frozen_roles.checker": str(folder)}
        recipe = write_recipe_file(tmp_path, settings | changes)
        with pytest.raises(UserError, match=f"rollout.frozen_roles.checker.*{told}"):
            jaxrl.train(str(recipe))


PLAIN = dataclasses.replace(MODEL, num_tokens=chat_tokenizer().vocab_size)
ADAPTED = dataclasses.replace(PLAIN, lora=LoraConfig(rank=2, alpha=8.0))


@contextlib.contextmanager
def run_beside_adapters(folder, **frozen):
    """A run that starts from a checkpoint and an adapter, and its weights and those of another checkpoint."""
    made = jax.jit(init_params, static_argnums=0)
    base, other = (made(PLAIN, jax.random.key(seed)) for seed in (1, 2))
    adapters = lora.split(made(ADAPTED, jax.random.key(3)))[0]
    learner = lora.join(jax.tree.map(lambda x: x + 0.1, adapters), base)
    save_checkpoint(base, PLAIN, folder / "base", dtype="float32")
    save_checkpoint(other, PLAIN, folder / "other", dtype="float32")
    save_adapter(learner, ADAPTED, folder / "adapter", dtype="float32", base="base")
    settings = settings_of(folder, **ONE, **{"rollout.slots": 16}) | {
        "weights": str(folder / "base"),
        "adapter": str(folder / "adapter"),
        "model.lora.rank": 2,
        "model.lora.alpha": 8.0,
        "rollout.agent": DUET,
        "rollout.agent_roles": ("solver", "checker", "judge"),
        "rollout.frozen_roles": {"judge": "start", "checker": str(folder / "other")} | frozen,
    }
    with jaxrl.open_run(str(write_recipe_file(folder, settings))) as run:
        yield run, learner, other


def test_a_folder_has_no_adapters_and_the_start_has_its_own(tmp_path):
    with run_beside_adapters(tmp_path) as (run, learner, other):
        run.roles.actor.for_sampling()
        backend = run.roles.actor.backend
        weights = [backend.inner.params, backend._frozen.pop("start")]
        adapters, plain = lora.split(*backend._frozen.values())
    jax.tree.map(np.testing.assert_array_equal, [*weights, plain], [learner, learner, other])
    # What they add is a product with zeros.
    of_b = [x for path, x in jax.tree.leaves_with_path(adapters) if "lora_b" in str(path)]
    assert of_b and not any(map(np.any, of_b))


@pytest.mark.long
@pytest.mark.parametrize("frozen", [{"checker": "start"}, {}], ids=["start", "a folder"])
def test_roles_beside_adapters_say_what_a_plain_pass_of_their_weights_does(
    frozen, tmp_path, sessions
):
    with run_beside_adapters(tmp_path, **frozen) as (run, learner, other):
        run.roles.actor.generate(problems(["same"]), OPTIONS)
    of_roles = {"solver": (ADAPTED, learner), "checker": (PLAIN, other)}
    if frozen:
        of_roles["checker"] = of_roles["solver"]
    for session, (role, (model, params)) in itertools.product(sessions, of_roles.items()):
        (said,) = session.conversations[role].branches()
        begin = int(np.argmax(said.mask))
        text, found = (said.tokens[:begin], said.tokens[begin:]), said.logprob[begin:]
        given = {"longest": 128, "temperature": 1.0}
        assert_close(found, plain_logprobs(model, params, *text, **given), scale=1)
        # The adapters matter.
        without = plain_logprobs(PLAIN, lora.split(learner)[1], *text, **given)
        assert np.abs(found - without).max() > 1e-2


@pytest.mark.long
def test_steps_train_on_the_other_roles_alone(tmp_path, sessions):
    metrics, done = step_of(tmp_path, {"kind": "duet"}, **ONE, **FROZEN)
    # Four problems with a group of the solver each.
    assert {*done.prompts.sources} == {"repeat/solver"} and len(done.prompts) == 4
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["training/same_token_fraction"] == 1
    assert metrics["train/num_trained_tokens"] == sum(x.sum() for x in done.mask)
    assert metrics["agent/checker/score/mean"] == 0.5


LAYOUTS = {
    "plain": ONE | {"optim.lr": 0.05},
    "int8": ONE | {"optim.lr": 0.05, "rollout.weights_dtype": "int8"},
    "speculation": ONE | {"optim.lr": 0.05, "rollout.speculate": 2},
    "adapters": ONE | {"optim.lr": 0.5, "model.lora.rank": 2},
    "bfloat16, eight devices": {
        **{"optim.lr": 0.05, "rollout.dtype": "bfloat16", "mesh.fsdp": 2},
        **{"mesh.train": "1-2-4", "mesh.generate": "1-1-2-4"},
    },
    "a folder": ONE | {"optim.lr": 0.05},
    "a folder beside adapters": ONE | {"optim.lr": 0.5, "model.lora.rank": 2},
    "devices of its own": {k: v for k, v in APART.items() if k != "algorithm.correction.weights"},
}


@pytest.mark.long
@pytest.mark.parametrize("case", LAYOUTS)
def test_the_frozen_role_says_the_same_after_the_policy_has_moved(case, tmp_path, sessions):
    """As an open run, which evaluates before and after steps; the keys of evaluations are the same."""
    changes = LAYOUTS[case] | FROZEN | {"optim.lr_warmup_steps": 0, "evaluation.num_samples": 1}
    settings = settings_of(tmp_path, {"kind": "same"}, **changes)
    settings |= {
        "data.evaluation.path": str(tmp_path / "evaluation.jsonl"),
        "data.evaluation.size": 4,
    }
    if "a folder" in case:
        settings["rollout.frozen_roles.checker"] = str(saved_model(tmp_path / "saved"))
    said = {}
    with jaxrl.open_run(str(write_recipe_file(tmp_path, settings))) as run:
        for when in ("before", "after"):
            sessions.clear()
            found = run.evaluate()
            said[when] = spoken(sessions, "solver"), spoken(sessions)
            assert [x for x in found if "acc" in x and "solver" in x]
            assert not [x for x in found if "checker" in x]
            for _ in range(2):
                run.step()
    (solver, checker), (moved, same) = said["before"], said["after"]
    assert same == checker and solver != moved
    assert checker != solver


@pytest.mark.slow
def test_a_run_that_was_stopped_or_is_replayed_has_the_same_bits(tmp_path, capsys):
    """The weights of the start are made anew, from the seed."""
    changes = (
        ONE | FROZEN | {"rollout.deterministic": True, "rollout.slots": 16, "run.save_every": 1}
    )
    made = []
    for name, stops in (("whole", (3,)), ("parts", (2, 3))):
        settings = settings_of(tmp_path, {"kind": "same"}, name=name, **changes)
        recipe = write_recipe_file(tmp_path, settings | {"run.rollouts_every": 1})
        for num_steps in stops:
            jaxrl.train(str(recipe), num_steps=num_steps)
        folder = tmp_path / "runs" / name / "seed0"
        kept = [path.read_text() for path in sorted((folder / "rollouts").iterdir())]
        rows = [*map(without_timings, read_metrics(folder / "rl/metrics.jsonl"))]
        made.append((kept, [{k: v for k, v in x.items() if "from_pages" not in k} for x in rows]))
    assert made[0] == made[1] and len(made[0][0]) == 3
    # From the checkpoint of step 2, with the weights that the run started from.
    assert cli.main(["jaxrl", "replay", str(folder), "--step", "3"]) == 0, capsys.readouterr().out


@pytest.mark.long
def test_two_processes_ask_a_frozen_role_and_repeat_what_they_have_recorded(tmp_path):
    made = []
    for name, schedule in (("first", ""), ("again", str(tmp_path / "runs" / "first" / "seed0"))):
        changes = {"name": name, "rollout.schedule": schedule, "mesh.train": "1-2-2"} | FROZEN
        settings = settings_of(tmp_path, {"kind": "duet"}, **changes, **{"run.num_steps": 2})
        recipe = write_recipe_file(tmp_path, settings)
        run_processes([recipe, recipe])
        rl = tmp_path / "runs" / name / "seed0" / "rl"
        rows = [*map(without_timings, read_metrics(rl / "metrics.jsonl"))]
        made.append((rows, (rl / "schedule.jsonl").read_text()))
    assert made[0] == made[1] and len(rows) == 2
    assert rows[0]["agent/checker/score/mean"] == 0.5


@pytest.mark.long
def test_a_model_is_evaluated_against_a_folder(tmp_path, sessions):
    changes = {
        "data.evaluation.path": str(tmp_path / "evaluation.jsonl"),
        "data.evaluation.size": 4,
    }
    settings = settings_of(tmp_path, {"kind": "same"}, **ONE, **FROZEN, **changes)
    recipe = write_recipe_file(tmp_path, settings)
    ours, theirs = (saved_model(tmp_path / f"model{n}", n, tmp_path / "tokenizer") for n in (1, 2))
    spoke = []
    for model, other in ((ours, theirs), (theirs, theirs)):
        sessions.clear()
        given = ["--model", model, "--config", recipe, "--n", 1, "--out", tmp_path / "out"]
        given.append(f"--config.rollout.frozen_roles.checker={other}")
        assert cli.main(["jaxrl", "evaluate", *map(str, given)]) == 0
        spoke.append((spoken(sessions, "solver"), spoken(sessions)))
    (solver, checker), (other_solver, same) = spoke
    assert checker == same and solver != other_solver
    rows = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(row)["source"] for row in rows} == {"repeat/solver"}
