"""Every recipe on a task that a two-layer model learns in seconds; the same wherever its roles live."""

import jax
import numpy as np
import pytest
from closeness import assert_close
from digits import write_problems
from tiny_runs import MODEL, problems_in, tiny_config

from jaxrl.commands.convert import main as convert
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.decoder import init_params, score_config
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_export import save_checkpoint
from jaxrl.tracking.metrics import read_metrics, without_timings
from jaxrl.trainer import program

APART = {
    "policy": {"roles": ("actor",), "train": "1-2-1"},
    "value": {"roles": ("critic",), "train": "1-1-1"},
    "judges": {"roles": ("reference", "reward"), "train": "1-1-1"},
}
APART_AND_SHARDED = {
    "policy": {"roles": ("actor",), "train": "1-2-2", "generate": "1-1-2-2", "fsdp": 2},
    "value": {"roles": ("critic",), "train": "1-1-2"},
    "judges": {"roles": ("reference", "reward"), "train": "1-2-1"},
}
# On the same devices, each in its own way.
SPLIT_OTHERWISE = {
    "all": {
        "roles": ("actor", "critic", "reference", "reward"),
        "train": "1-4-2",
        "generate": "1-2-2-2",
        "fsdp": 2,
        "layouts": {
            "critic": {"train": "2-2-2", "fsdp": 1},
            "reference": {"train": "1-2-4", "fsdp": 4},
        },
    }
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Problems and two models that judge."""
    folder = tmp_path_factory.mktemp("recipes")
    write_problems(folder)
    for seed, name in enumerate(("reward", "cost")):
        model = score_config(MODEL)
        params = init_params(model, jax.random.key(seed))
        save_checkpoint(params, model, folder / name, dtype="float32")
    return folder


def make_config(folder, output, recipe: str, **changes) -> Config:
    settings = {
        "name": recipe,
        "algorithm.dataflow": recipe,
        "algorithm.updates_per_step": 2,
        "critic.lr": 1e-2,
        "evaluation.every": 10,
        "evaluation.num_samples": 2,
        "run.num_steps": 2,
        "run.save_every": 10,
    }
    return tiny_config(output, problems_in(folder), settings, **changes)


def ppo_settings(folder) -> dict:
    return {
        "algorithm__advantage": "gae",
        "algorithm__whiten": True,
        "algorithm__kl__reward_coef": 0.05,
        "reward__model": str(folder / "reward"),
    }


def curve(config: Config) -> list[dict]:
    rows = read_metrics(config.run_folder.path / "rl" / "metrics.jsonl")
    return [without_timings(row) for row in rows]


@pytest.fixture(scope="module")
def colocated(folder, tmp_path_factory):
    """PPO with actor, critic, reference and reward model, all on one device."""
    config = make_config(folder, tmp_path_factory.mktemp("ppo"), "ppo", **ppo_settings(folder))
    assert program.train(config, devices=jax.devices()[:1]) == 0
    return curve(config)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(APART, id="apart", marks=pytest.mark.long),
        pytest.param(APART_AND_SHARDED, id="apart and sharded", marks=pytest.mark.slow),
        pytest.param(SPLIT_OTHERWISE, id="split otherwise", marks=pytest.mark.slow),
    ],
)
def test_ppo_is_the_same_wherever_its_roles_live(placement, folder, tmp_path, colocated):
    config = make_config(folder, tmp_path, "ppo", **ppo_settings(folder), placement=placement)
    assert program.train(config) == 0
    for ours, theirs in zip(curve(config), colocated, strict=True):
        assert ours.keys() == theirs.keys()
        # How even the shards of a batch are, and the work of each, depend on their number.
        for name in theirs.keys() - {"perf/imbalance", "perf/update_tflop"}:
            assert_close(ours[name], theirs[name], rtol=2e-4, scale=0.1, err_msg=name)


def test_ppo_reports_its_critic_and_its_reference(colocated):
    last = colocated[-1]
    assert last["critic/vf_loss"] > 0
    # A head of zeros explains nothing; after one update its values vary.
    assert colocated[1]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-6)
    assert colocated[1]["critic/values/max"] == 0 and last["critic/vf_explained_var"] != 0
    for name in ("values", "returns"):
        spread = [last[f"critic/{name}/{x}"] for x in ("min", "mean", "max")]
        assert spread == sorted(spread) and spread[0] < spread[-1]
    assert last["actor/first_ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    # One step of learning has left the reference.
    assert colocated[1]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-5)
    assert abs(last["actor/reward_kl_penalty"]) > 1e-5
    assert last["reward/model/std"] > 0


ACTOR_CRITIC = {
    "algorithm__advantage": "gae",
    "algorithm__whiten": True,
    "algorithm__updates_per_step": 1,
    "critic__clip": float("inf"),
    "critic__epochs": 2,
}
VPG = {**ACTOR_CRITIC, "algorithm__loss": "policy_gradient", "algorithm__loss_options": {}}
TRPO = {**ACTOR_CRITIC, "algorithm__loss": "trpo", "algorithm__loss_options": {"kl_coef": 0.0}}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "changes"), [("vpg", VPG), ("trpo", TRPO)], ids=["vpg", "trpo"])
def test_policy_gradient_and_trust_region_resume_to_the_same_numbers(
    recipe, changes, folder, tmp_path
):
    curves = []
    for name, stops in (("whole", (3,)), ("resumed", (1, 3))):
        for steps in stops:
            config = make_config(folder, tmp_path / name, recipe, **changes, run__num_steps=steps)
            assert program.train(config, devices=jax.devices()[:1]) == 0
        curves.append({row["step"]: row for row in curve(config)})
    whole, resumed = curves
    assert whole[3] == resumed[3]
    assert whole[2]["critic/vf_loss"] > 0 and whole[2]["actor/grad_norm"] > 0
    # The critic's values of the last step explain more than nothing: the baseline is learned.
    assert whole[3]["critic/vf_explained_var"] != 0
    if recipe == "trpo":
        assert 0 < whole[2]["actor/trust_region_kl"] <= 0.01
        assert whole[2]["actor/trust_region_gain"] > 0 and "actor/lr" not in whole[2]


ONE_TRUNK = {
    "algorithm__dataflow": "ppo",
    "algorithm__advantage": "gae",
    "algorithm__kl__reward_coef": 0.05,
    "critic__trunk_coef": 0.5,
}


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"model__lora__rank": 2}], ids=["whole", "adapters"])
def test_actor_and_critic_on_one_trunk_resume_to_the_same_numbers(more, folder, tmp_path):
    changes = {**ONE_TRUNK, **more, "optim__lr": 1e-2}
    whole, resumed = whole_and_resumed(folder, tmp_path, **changes)
    assert whole[3] == resumed[3]
    # Values begin at 0, and the one update trains them too.
    assert whole[1]["critic/values/max"] == 0 and whole[3]["critic/values/mean"] != 0
    assert 0 < whole[3]["critic/vf_loss"] < whole[1]["critic/vf_loss"]
    assert whole[3]["actor/grad_norm"] > 0 and "critic/grad_norm" not in whole[3]
    # The run has no other model of values, and its policy alone is exported.
    path = tmp_path / "whole" / "grpo" / "seed0"
    assert not list(path.glob("rl/checkpoints/**/critic"))
    out = tmp_path / "exported"
    assert convert(["convert", "--path", str(path), "--out", str(out)]) == 0
    assert not read_config(out).num_scores


@pytest.mark.long
def test_actor_and_critic_learn_on_one_trunk(folder, tmp_path):
    """Half of the tokens are paid for. The policy takes to these, and its values tell the reward."""
    rules = tmp_path / "rules.py"
    rules.write_text(
        "def rule(responses):\n    return [(x < 144).mean() for x in responses.tokens]\n"
    )
    changes = {
        "reward__functions": {"rule": {"path": f"{rules}:rule", "weight": 1.0}},
        "algorithm__whiten": True,
        "optim__lr": 1e-2,
        "run__num_steps": 15,
        "evaluation__every": 0,
    }
    config = make_config(folder, tmp_path, "ppo", **ONE_TRUNK, **changes)
    assert program.train(config, devices=jax.devices()[:1]) == 0
    rows = curve(config)
    assert rows[-1]["reward/rule/mean"] > rows[0]["reward/rule/mean"] + 0.2
    assert rows[-1]["critic/vf_loss"] < 0.5 * rows[0]["critic/vf_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh__train": "1-4-2", "mesh__generate": "1-2-2-2", "mesh__fsdp": 2},
        {"mesh__train": "2-2-2", "train__rows": 8},
        {
            "placement": {
                "policy": {"roles": ("actor", "reference"), "train": "1-2-2", "fsdp": 2},
                "sampler": {"roles": ("rollout",), "train": "1-1-2"},
            }
        },
    ],
    ids=["fsdp and tensor", "pipeline", "a sampler of its own"],
)
def test_one_trunk_is_the_same_on_any_mesh(mesh, folder, tmp_path):
    curves = []
    for name, more in (("one", {}), ("many", mesh)):
        shape = {key: x for key, x in mesh.items() if key == "train__rows"}
        config = make_config(folder, tmp_path / name, "ppo", **{**ONE_TRUNK, **shape, **more})
        assert program.train(config, devices=None if more else jax.devices()[:1]) == 0
        curves.append(curve(config)[-1])
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/values/mean"):
        assert_close(curves[1][name], curves[0][name], rtol=2e-4, scale=0.1, err_msg=name)


def whole_and_resumed(folder, tmp_path, **changes) -> list[dict]:
    """The rows by step of a run of three steps, and of one that goes on after its second."""
    curves = []
    for name, stops in (("whole", (3,)), ("resumed", (2, 3))):
        for steps in stops:
            config = make_config(folder, tmp_path / name, "grpo", **changes, run__num_steps=steps)
            assert program.train(config, devices=jax.devices()[:1]) == 0
        curves.append({row["step"]: row for row in curve(config)})
    return curves


@pytest.mark.long
def test_the_entropy_bonus_follows_its_target_and_resumes(folder, tmp_path):
    """A coefficient that changes compiles nothing, and a resumed run goes on with it."""
    changes = {"algorithm__entropy_target": 5.0, "algorithm__entropy_coef": 0.01}
    whole, resumed = whole_and_resumed(folder, tmp_path, **changes)
    # An untrained policy over 288 tokens has an entropy of at most log 288 = 5.66: it is above the target.
    assert all(5.0 < row["actor/entropy"] < 5.67 for step, row in whole.items() if step)
    # The first step knows no entropy yet and has the bonus; then it rests while its coefficient falls.
    assert [whole[step]["actor/entropy_coef"] for step in (1, 2, 3)] == [pytest.approx(0.01), 0, 0]
    assert resumed[3] == whole[3]
    config = make_config(
        folder, tmp_path / "below", "grpo", algorithm__entropy_target=6.0, run__num_steps=3
    )
    assert program.train(config, devices=jax.devices()[:1]) == 0
    found = [row["actor/entropy_coef"] for row in curve(config) if row["step"]]
    assert found == pytest.approx([0.0, 0.005, 0.01])


@pytest.mark.long
def test_the_baseline_of_reinforce_is_the_average_of_earlier_steps_and_resumes(folder, tmp_path):
    rules = tmp_path / "rules.py"
    rules.write_text(
        "def rule(responses):\n    return [int(x.sum() % 5) for x in responses.tokens]\n"
    )
    changes = {
        "reward__functions": {"rule": {"path": f"{rules}:rule", "weight": 1.0}},
        "algorithm__advantage": "reinforce",
        "algorithm__baseline_decay": 0.75,
        "algorithm__loss": "policy_gradient",
        "algorithm__loss_options": {},
        "rollout__num_samples": 1,
    }
    whole, resumed = whole_and_resumed(folder, tmp_path, **changes)
    mean = {step: row.get("critic/rewards/mean") for step, row in whole.items()}
    expected = [0.0, mean[1], 0.75 * mean[1] + 0.25 * mean[2]]
    assert [whole[step]["reward/moving_average"] for step in (1, 2, 3)] == pytest.approx(expected)
    assert mean[1] != mean[2] and whole[3] == resumed[3]
    # The advantage of every token is its answer's reward less that.
    assert whole[3]["critic/advantages/max"] == pytest.approx(
        whole[3]["critic/rewards/max"] - expected[2], abs=1e-5
    )


def safe_settings(folder) -> dict:
    return {
        **ppo_settings(folder),
        "cost__model": str(folder / "cost"),
        "cost__limit": -2.0,
        "cost__pretrain_coef": 0.1,
    }


@pytest.fixture(scope="module")
def safe(folder, tmp_path_factory):
    """Safe RLHF with six models on the same eight devices."""
    output = tmp_path_factory.mktemp("safe")
    config = make_config(
        folder, output, "safe_rlhf", **safe_settings(folder), mesh__train="1-2-4", mesh__fsdp=2
    )
    assert program.train(config) == 0
    return curve(config)


@pytest.mark.slow
def test_safe_rlhf_is_the_same_wherever_its_roles_live(folder, tmp_path, safe):
    placement = {
        "policy": {"roles": ("actor", "reference"), "train": "1-2-2"},
        "reward": {"roles": ("critic", "reward"), "train": "1-1-2"},
        "cost": {"roles": ("cost_critic", "cost"), "train": "1-2-1"},
    }
    config = make_config(
        folder, tmp_path, "safe_rlhf", **safe_settings(folder), placement=placement
    )
    assert program.train(config) == 0
    for ours, theirs in zip(curve(config), safe, strict=True):
        for name in theirs:
            assert_close(ours[name], theirs[name], rtol=2e-4, scale=0.1, err_msg=name)


@pytest.mark.long
def test_the_multiplier_follows_the_cost(folder, tmp_path):
    config = make_config(folder, tmp_path, "safe_rlhf", **safe_settings(folder))
    assert program.train(config, devices=jax.devices()[:1]) == 0
    first, second = curve(config)[1:3]
    assert first["cost/multiplier"] == 1.0
    assert first["cost/mean"] > -2.0
    assert second["cost/multiplier"] == pytest.approx(
        np.exp(0.1 * (first["cost/mean"] + 2.0)), rel=1e-5
    )
    assert first["cost_critic/vf_loss"] > 0 and first["cost_critic/vf_explained_var"] == 0


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("remax", {"algorithm__advantage": "remax", "algorithm__loss": "policy_gradient"}),
        pytest.param(
            "grpo",
            {
                "algorithm__advantage": "optimal_token_baseline",
                "algorithm__correction__weights": "token",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "grpo",
            {
                "algorithm__advantage": "reinforce_plus_plus",
                "algorithm__correction__bypass": True,
                "algorithm__loss": "kl_cov",
                "algorithm__loss_options": {"kl_coef": 1.0, "fraction": 0.1},
                "rollout__num_samples": 1,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["remax", "optimal token baseline, truncated weights", "reinforce++, kl-cov, bypass"],
)
def test_recipes_without_a_critic(recipe, changes, folder, tmp_path):
    if "algorithm__loss" in changes:
        changes = {"algorithm__loss_options": {}, **changes}
    config = make_config(folder, tmp_path, recipe, **changes)
    assert program.train(config, devices=jax.devices()[:1]) == 0
    last = curve(config)[-1]
    # A minibatch in which no response beats its baseline is skipped.
    assert last["actor/grad_norm"] > 0 and last["actor/skipped_updates"] < 1
    # Nothing is left out.
    trained = last["train/num_trained_tokens"]
    assert trained == pytest.approx(response_tokens(config, last), rel=1e-5)
    assert last["actor/first_ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    # The old log-probabilities are the trainer's own, or the sampler's. An ulp of one is 5e-7.
    limit = 1e-4 if "algorithm__correction__bypass" in changes else 1e-5
    assert last["actor/first_ratio_max_deviation"] <= limit
    # Told before the update or, in bypass, inside each, when those before have moved the policy.
    assert abs(last["rollout_corr/kl"]) < (1e-2 if limit > 1e-6 else 1e-5)
    weighed = "algorithm__correction__weights" in changes
    assert ("rollout_corr/rollout_is_mean" in last) == weighed


@pytest.mark.long
def test_rules_functions_models_and_a_judge_together(folder, tmp_path):
    (tmp_path / "rules.py").write_text(
        "def brevity(responses):\n    return [-len(tokens) / 8 for tokens in responses.tokens]\n"
    )
    directory = tmp_path / "judge"
    save_checkpoint(init_params(MODEL, jax.random.key(5)), MODEL, directory, dtype="float32")
    train_tokenizer(["Score: 1 2 3 4 5 how good is it?"], vocab_size=288).save(directory)
    judge = {
        "model": str(directory),
        "template": "How good is {response}?",
        "max_prompt_tokens": 32,
        "max_verdict_tokens": 4,
    }
    config = make_config(
        folder,
        tmp_path,
        "grpo",
        reward__functions={"brevity": {"path": f"{tmp_path / 'rules.py'}:brevity", "weight": 0.5}},
        reward__model=str(folder / "reward"),
        reward__mask_truncated=True,
        **{f"reward__judge__{name}": value for name, value in judge.items()},
        placement={
            "policy": {"roles": ("actor", "reward"), "train": "1-1-1"},
            "judge": {"roles": ("judge",), "train": "1-1-1"},
        },
        algorithm__advantage="gdpo",
        run__num_steps=1,
    )
    assert program.train(config) == 0
    (row,) = curve(config)[1:]
    # Random weights write no score, and nobody is paid for that.
    assert row["reward/judge/parse_failures"] == 1.0
    assert row["reward/judge/mean"] == 0.0
    parts = {"grader": 1.0, "brevity": 0.5, "model": 1.0, "judge": 1.0}
    expected = sum(weight * row[f"reward/{name}/mean"] for name, weight in parts.items())
    assert row["critic/score/mean"] == pytest.approx(expected, rel=1e-5)
    assert row["reward/brevity/mean"] == pytest.approx(-row["response_length/mean"] / 8, rel=1e-5)
    # GDPO whitens what it makes of the four.
    assert row["critic/advantages/mean"] == pytest.approx(0, abs=1e-5)
    assert row["actor/grad_norm"] > 0
    # Random weights seldom end an answer, and then early. Those that were cut are left out.
    assert 0.8 < row["response_length/clip_ratio"] < 1
    assert 0 < row["train/num_trained_tokens"] < 0.2 * response_tokens(config, row)


def response_tokens(config: Config, row: dict) -> float:
    """Of all answers of a step."""
    return row["response_length/mean"] * config.rollout.num_prompts * config.rollout.num_samples


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("reinforce", {}, "dataflow 'reinforce' is not known; use one of dapo, distill, grpo, ppo"),
        ("dapo", {"algorithm__kl__loss_coef": 0.1}, "dataflow 'dapo' has no reference"),
        ("grpo", {"rollout__num_samples": 1}, "at least 2 answers to each prompt"),
        ("grpo", {"algorithm__advantage": "gae"}, "advantage 'gae' needs value_BT"),
        ("grpo", {"algorithm__advantage": "grpoo"}, "advantage 'grpoo' is not known; use one of"),
        ("ppo", {}, "computes value_BT, which advantage 'grpo' does not use"),
        ("grpo", {"algorithm__loss": "gspo"}, "policy loss 'gspo' has no option dual_clip"),
        ("grpo", {"algorithm__aggregation": "mean"}, "aggregation 'mean' is not known; use one of"),
        ("grpo", {"algorithm__aggregation": "seq-mean-token-sum-norm"}, "needs scale"),
        ("safe_rlhf", {"algorithm__advantage": "gae"}, "needs a cost model; set cost.model"),
        ("trpo", TRPO | {"algorithm__updates_per_step": 2}, "updates_per_step 2; set it to 1"),
        ("trpo", TRPO | {"algorithm__correction__bypass": True}, "bypass True; set it to False"),
        (
            "trpo",
            TRPO | {"rollout__top_p": 0.9},
            "truncated_logprobs True its loss would be one of",
        ),
        ("grpo", {"critic__trunk_coef": 0.1}, "excludes algorithm.dataflow 'grpo'; take 'ppo'"),
        ("trpo", TRPO | {"critic__trunk_coef": 0.1}, "excludes algorithm.dataflow 'trpo'; take"),
        (
            "safe_rlhf",
            ONE_TRUNK | {"algorithm__dataflow": "safe_rlhf", "cost__model": "cost"},
            "excludes algorithm.dataflow 'safe_rlhf'; take 'ppo' or 'vpg'",
        ),
        ("ppo", ONE_TRUNK | {"critic__weights": "w"}, "excludes critic.weights 'w'; set it to ''"),
        ("ppo", ONE_TRUNK | {"critic__warmup_steps": 2}, "warmup_steps 2; set it to 0"),
        (
            "ppo",
            ONE_TRUNK | {"algorithm__epochs": 2},
            "critic.epochs 1; set it to 2, algorithm.epochs",
        ),
        (
            "ppo",
            ONE_TRUNK | {"algorithm__correction__bypass": True},
            "bypass True; set it to False",
        ),
        (
            "ppo",
            ONE_TRUNK
            | {"algorithm__kl__reward_coef": 0.0, "algorithm__kl__loss_coef": 0.1}
            | {"algorithm__kl__loss_estimate": "full"},
            "excludes algorithm.kl.loss_estimate 'full'; set it to 'k3'",
        ),
        (
            "ppo",
            ONE_TRUNK | {"placement": {"a": {"roles": ("actor", "critic", "reference")}}},
            "'critic', which is no role of this run",
        ),
        ("grpo", {"placement": {"a": {"roles": ("actor", "critic")}}}, "no role of this run"),
    ],
)
def test_settings_that_contradict_each_other(recipe, changes, message, folder, tmp_path):
    with pytest.raises(UserError) as error:
        program.train(make_config(folder, tmp_path, recipe, **changes))
    assert message in str(error.value)
    assert not list(tmp_path.rglob("rl"))


@pytest.mark.long
def test_a_run_trains_the_tokens_of_the_highest_entropy(folder, tmp_path):
    first = {}
    for share in (1.0, 0.2):
        changes = {"algorithm__top_entropy_quantile": share, "name": f"share-{share}"}
        config = make_config(folder, tmp_path, "grpo", **changes, run__num_steps=1)
        assert program.train(config, devices=jax.devices()[:1]) == 0
        (first[share],) = (row for row in curve(config) if row["step"] == 1)
    # The same samples, and advantages; another gradient of them.
    name = "actor/grad_norm"
    assert first[1.0]["critic/advantages/max"] == first[0.2]["critic/advantages/max"] > 0
    assert first[0.2][name] > 0 and abs(first[0.2][name] / first[1.0][name] - 1) > 0.05
