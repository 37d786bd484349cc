"""Samples that every reward abstains from: the step is the one without them, whatever the algorithm."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import packed
from test_every_algorithm import OPTIONS as LOSS_OPTIONS
from test_policy import ADAM, first_state, fresh, step
from tokens import answers_of, prompts_of

from jaxrl.algos.advantages import ADVANTAGES
from jaxrl.dataflows.dynamic_sampling import kept_groups
from jaxrl.dataflows.experience import Experience, Sampled
from jaxrl.dataflows.preparation import Advantages, KlCoefficient, Packer, RewardAverage
from jaxrl.dataflows.step_timer import NoTimer
from jaxrl.rewards.score import Term, weighted_sum
from jaxrl.roles.advantage_estimator import Estimator, VocabularyBatch
from jaxrl.roles.losses import policy
from jaxrl.roles.packing import PackedShape
from jaxrl.types import Scored

N, G = 4, 3
SHAPE = PackedShape(minibatches=1, microbatches=6, rows=2, tokens=24)
TWO_UPDATES = PackedShape(minibatches=2, microbatches=3, rows=2, tokens=24)
# None of a group, some, all but one, and all.
ABSTAINED = np.isin(np.arange(N * G), [3, 6, 7, 9, 10, 11])
FIELDS = ("ref_logprob", "value", "sum_pi_squared", "teacher_logprob")


class Timer(NoTimer):
    def when_done(self, result):
        return result


@dataclasses.dataclass
class Case:
    """Answers with rewards, and a number a token for whatever an algorithm may need."""

    scored: Scored
    of_tokens: dict[str, list[np.ndarray]]

    @staticmethod
    def of(abstained_B: np.ndarray, seed: int = 0) -> "Case":
        rng = np.random.default_rng(seed)
        prompts = prompts_of(*(rng.integers(0, 16, n) for n in (3, 5, 2, 4)))
        tokens = [rng.integers(0, 16, n).astype(np.int32) for n in rng.integers(2, 7, N * G)]
        logprobs = [rng.uniform(-4, -1, len(t)) for t in tokens]
        completions = answers_of(prompts, tokens, logprobs)
        shaping_B = rng.choice([0.0, -0.25], N * G).astype(np.float32)
        zeros = np.zeros(N * G, np.float32)
        scored = Scored(completions, zeros > 0, zeros, shaping_B, (None,) * (N * G))
        first_B, second_B = rng.choice([-1.0, 0.5, 1.0], (2, N * G)).tolist()
        given = [None if a else x for x, a in zip(first_B, abstained_B, strict=True)]
        # Of some samples the second alone abstains, and the first decides.
        other = [
            None if a or b % 4 == 1 else x
            for b, (x, a) in enumerate(zip(second_B, abstained_B, strict=True))
        ]
        scored, _ = weighted_sum(scored, [Term("one", 2.0, given), Term("two", 0.5, other)])
        fields = {
            name: [rng.uniform(0.2, 0.9, len(t)).astype(np.float32) for t in tokens]
            for name in FIELDS
        }
        return Case(scored, fields)

    def with_them(self, shape=SHAPE) -> Experience:
        """What a step packs, with the samples that nobody has scored."""
        pack = Packer(fresh(), shape, max_prompt_tokens=8)
        experience = pack(Sampled(self.scored))
        packing, batch = experience.packing, experience.batch
        field = {
            name: packing.pack_ends(values, np.float32) for name, values in self.of_tokens.items()
        }
        batch = batch.replace(old_logprob=batch.rollout_logprob, ref_logprob=field["ref_logprob"])
        batch = batch.extended_as(VocabularyBatch, sum_pi_squared=field["sum_pi_squared"])
        return experience.extended(batch)

    def without_them(self, estimator: Estimator):
        """(advantages by sample, batch) of a step that never had these samples."""
        scored, done = self.scored, self.scored.completions
        rows, kept = [], np.flatnonzero(scored.counts_B)
        for b in kept:
            prompt = done.prompts.tokens[b // G]
            before = np.zeros(len(prompt), np.float32)
            one = {
                "rollout_logprob": done.rollout_logprob[b],
                "old_logprob": done.rollout_logprob[b],
                "loss_mask": np.ones(len(done.tokens[b]), np.float32),
                **{name: self.of_tokens[name][b] for name in FIELDS},
            }
            rows.append({name: np.concatenate([before, x]) for name, x in one.items()})
            rows[-1]["tokens"] = np.concatenate([prompt, done.tokens[b]])
        extra = [{name: row.pop(name) for name in FIELDS[1:]} for row in rows]
        packing, batch = packed(rows, SHAPE)
        field = {n: packing.pack([row[n] for row in extra], np.float32) for n in FIELDS[1:]}
        batch = batch.extended_as(VocabularyBatch, sum_pi_squared=field["sum_pi_squared"])
        advantage, target, _ = estimator(
            batch,
            scored.reward_B[kept],
            (kept // G).astype(np.int32),
            num_groups=N,
            **given_to(estimator, scored, kept, field),
        )
        return kept, packing, batch.replace(advantage=advantage), target


def given_to(estimator: Estimator, scored: Scored, kept: np.ndarray, field) -> dict:
    inputs, given = estimator.inputs, {}
    if "score_BK" in inputs:
        given["score_BK"] = np.column_stack([scored.term_BK, scored.shaping_B])[kept]
        given["weight_K"] = np.append(scored.term_weight_K, np.float32(1))
    if "value_BT" in inputs:
        given["value"] = field["value"]
    if "average_reward" in inputs:
        given["average_reward"] = 0.25
    if "baseline_BT" in inputs:
        given["baseline_B"] = np.linspace(-1, 1, N, dtype=np.float32)[kept // G]
    if "teacher_logprob_BT" in inputs:
        given["arrays"] = {"teacher_logprob_BT": field["teacher_logprob"]}
    return given


def estimated(case: Case, estimator: Estimator, shape=SHAPE) -> tuple[Experience, jax.Array]:
    """The step's own advantages and returns."""
    experience = case.with_them(shape)
    advantages = Advantages(fresh(), estimator, KlCoefficient(0.0), Timer())
    packing = experience.packing
    field = {n: packing.pack_ends(x, np.float32) for n, x in case.of_tokens.items()}
    given = given_to(estimator, case.scored, np.arange(N * G), field)
    return advantages._estimated(experience, **given)


def responses(packing, field, lengths) -> list[np.ndarray]:
    unpacked = packing.unpack(np.asarray(field))
    return [x[len(x) - n :] for x, n in zip(unpacked, lengths, strict=True)]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_are_those_of_the_batch_without_them(name):
    case, estimator = Case.of(ABSTAINED), Estimator.of(name, {})
    assert (~case.scored.counts_B).tolist() == ABSTAINED.tolist()
    kept, packing, batch, target = case.without_them(estimator)
    experience, own_target = estimated(case, estimator)
    lengths = case.scored.completions.lengths_B
    for own, other in ((experience.batch.advantage, batch.advantage), (own_target, target)):
        assert np.isfinite(np.asarray(own)).all()
        found = responses(experience.packing, own, lengths)
        expected = responses(packing, other, lengths[kept])
        for b, x in zip(kept, expected, strict=True):
            np.testing.assert_allclose(found[b], x, rtol=1e-5, atol=1e-6)
        assert all(not found[b].any() for b in np.flatnonzero(ABSTAINED))
    assert any(np.abs(x).max() > 0.1 for x in expected)


def test_advantages_by_hand():
    """Two of three in a group: s - mean with n = 2. One alone keeps its score, as in a group of one."""
    case = Case.of(ABSTAINED)
    reward_NG = case.scored.reward_B.reshape(N, G)
    experience, _ = estimated(case, Estimator.of("grpo", {"normalize_std": False}))
    found = responses(
        experience.packing, experience.batch.advantage, case.scored.completions.lengths_B
    )
    first = np.array([x[0] for x in found]).reshape(N, G)
    np.testing.assert_allclose(first[0], reward_NG[0] - reward_NG[0].mean(), atol=1e-6)
    np.testing.assert_allclose(first[1, 1:], reward_NG[1, 1:] - reward_NG[1, 1:].mean(), atol=1e-6)
    np.testing.assert_allclose(first[2, 2], reward_NG[2, 2], atol=1e-6)
    assert first[1, 0] == first[2, 0] == first[2, 1] == 0 and not first[3].any()


@pytest.mark.parametrize(
    ("advantage", "loss", "aggregation"),
    [("grpo", "clipped", "token-mean"), ("rloo", "gspo", "seq-mean-token-mean")],
)
def test_the_update_is_that_of_the_batch_without_them(advantage, loss, aggregation):
    case, estimator = Case.of(ABSTAINED), Estimator.of(advantage, {})
    objective = policy(
        loss, LOSS_OPTIONS.get(loss, {}), aggregation=aggregation, entropy_coef=0.01, kl_coef=0.1
    )
    _, _, batch, _ = case.without_them(estimator)
    # Both from the host: arrays that lie on a device already would compile the same program again.
    (params, metrics), (expected, of_others) = (
        step(fresh(), jax.device_get(x), objective)
        for x in (estimated(case, estimator)[0].batch, batch)
    )
    assert_close(params, expected, scale=1)
    for key, value in of_others.items():
        assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), params, first_state().params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_the_moving_average_is_of_the_samples_that_have_a_score():
    scored = Case.of(ABSTAINED).scored
    average = RewardAverage(0.5, 1.0)
    average.follow(scored)
    assert average.value == pytest.approx(0.5 + 0.5 * np.nanmean(scored.reward_B), abs=1e-6)
    # Nothing is known of a step without any.
    average.follow(Case.of(np.ones(N * G, bool)).scored)
    assert average.value == pytest.approx(0.5 + 0.5 * np.nanmean(scored.reward_B), abs=1e-6)


@pytest.mark.parametrize("which", ["second minibatch", "all"])
def test_a_minibatch_that_nobody_has_scored_moves_nothing(which):
    abstained_B = np.arange(N * G) >= (0 if which == "all" else N * G // 2)
    case = Case.of(abstained_B)
    experience, _ = estimated(case, Estimator.of("grpo", {}), TWO_UPDATES)
    objective = policy("clipped", LOSS_OPTIONS["clipped"])
    params, metrics = step(fresh(optim=ADAM), experience.batch, objective)
    assert all(np.isfinite(x) for x in metrics.values())
    assert metrics["skipped_updates"] == (1 if which == "all" else 0.5)
    if which == "all":
        assert metrics["loss"] == metrics["grad_norm"] == 0
        jax.tree.map(np.testing.assert_array_equal, params, first_state().params)
    means = [x for x in experience.metrics if x.endswith(("/mean", "/max", "/min"))]
    assert bool(means) == (which != "all")
    assert experience.metrics["reward/abstained"] == abstained_B.sum()


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(
        st.lists(st.sampled_from([None, -1.0, 0.0, 1.0]), min_size=3, max_size=3), min_size=1
    )
)
def test_a_group_is_kept_by_those_of_its_samples_that_have_a_score(scores):
    flat = list(itertools.chain(*scores))
    prompts = prompts_of(*([1] for _ in scores))
    token = [np.zeros(1, np.int32)] * len(flat)
    done = answers_of(prompts, token, [np.zeros(1)] * len(flat))
    zeros = np.zeros(len(flat), np.float32)
    right_B = np.array([x == 1 for x in flat])
    scored = Scored(done, right_B, zeros, zeros, (None,) * len(flat))
    scored, metrics = weighted_sum(scored, [Term("mine", 1.0, flat)])
    known = [[x for x in of if x is not None] for of in scores]
    assert kept_groups(scored, "score").tolist() == [len(set(of)) > 1 for of in known]
    mixed = [len({x == 1 for x in of}) > 1 for of in known]
    assert kept_groups(scored, "correctness").tolist() == mixed
    assert metrics.get("reward/mine/abstained", 0) == flat.count(None)
    values = [x for of in known for x in of]
    assert metrics.get("reward/mine/mean") == (pytest.approx(np.mean(values)) if values else None)
