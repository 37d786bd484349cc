"""Conversations of agents in training: turns with keys of their own, branches, failures."""

import dataclasses

import numpy as np
import pytest
from test_redraw import OPTIONS, actor_of, fraction
from tokens import prompts_of

from jaxrl.dataflows.dynamic_sampling import kept_groups
from jaxrl.dataflows.preparation import _groups
from jaxrl.dataflows.rewarding import SequenceScores
from jaxrl.rewards.grading import Verdict
from jaxrl.rewards.score import AskedVerdicts
from jaxrl.roles.advantage_estimator import Estimator
from jaxrl.roles.batches import pack_completions
from jaxrl.roles.packing import PackedShape, RowLimits
from jaxrl.roles.policy import Actor
from jaxrl.rollout.sampling import turn_seed
from jaxrl.types import AgentFailure, AgentRows, Branch, Completions, Prompts, Scored, TurnText


def row(*parts: tuple[list[int], float]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask of parts."""
    tokens = [token for part, _ in parts for token in part]
    mask = [mask for part, mask in parts for _ in part]
    return np.array(tokens, np.int32), np.array(mask, np.float32)


def talk(prompts: Prompts, rows, branches, *, scores=None, failed=None) -> Completions:
    """Completions of agents; log-probabilities are -.5 where the mask is 1."""
    B = len(rows)
    tokens, mask = zip(*rows, strict=True)
    return Completions(
        prompts=prompts,
        num_samples=B // len(prompts),
        tokens=tokens,
        rollout_logprob=tuple(-0.5 * m for m in mask),
        entropy=tuple(m for m in mask),
        truncated_B=np.zeros(B, bool),
        texts=("",) * B,
        mask=mask,
        turns=((TurnText(True, "7"),),) * B,
        started_B=np.full(B, OPTIONS.step, np.int32),
        of_agents=AgentRows(
            np.array([np.nan] * B if scores is None else scores, np.float32),
            tuple(AgentFailure("failed") if x else None for x in failed or [False] * B),
            tuple(tuple(Branch(t, -0.5 * m, m, 0, m) for t, m in some) for some in branches),
        ),
    )


def scored_of(completions: Completions) -> Scored:
    zeros = np.zeros(len(completions), np.float32)
    return Scored(completions, zeros > 0, zeros, zeros, (None,) * len(zeros))


def test_branches_lie_with_their_sample_and_share_its_advantage():
    # Prompt 0 has samples 0 and 1, prompt 1 has 2 and 3; sample 1 has two further conversations.
    rows = [row(([5, 6], 1), ([7], 0), ([8], 1)), row(([5], 1)), row(([9], 1)), row(([4, 4], 1))]
    further = [row(([2, 3], 0), ([6], 1)), row(([2], 0), ([7, 7, 7], 1))]
    completions = talk(prompts_of([2, 3], [1]), rows, [[], further, [], []])
    batch, _ = pack_completions(completions, PackedShape(2, 4, 1, 8))
    number = np.asarray(batch.sequence)
    places = {
        n: tuple(np.argwhere((number == n) & (np.asarray(batch.segment_ids) > 0))[0][:1])
        for n in np.unique(number[np.asarray(batch.segment_ids) > 0]).tolist()
    }
    # Sequence 1 + 1 * 4 and 1 + 2 * 4; the first minibatch has prompt 0.
    assert places == {0: (0,), 1: (0,), 5: (0,), 9: (0,), 2: (1,), 3: (1,)}
    assert np.asarray(batch.loss_mask).sum() == 3 + 1 + 1 + 3 + 1 + 2
    at_9 = (number == 9) & (np.asarray(batch.segment_ids) > 0)
    assert np.asarray(batch.tokens)[at_9].tolist() == [2, 7, 7, 7]
    assert np.asarray(batch.rollout_logprob)[at_9].tolist() == [0, -0.5, -0.5, -0.5]
    # Rewards 0 and 1 of prompt 0: deviations from their mean are -.5 and .5, whatever the branches.
    group_B, num_groups = _groups(scored_of(completions))
    score_B = np.array([0, 1, 1, 1], np.float32)
    advantage, _, _ = Estimator.of("grpo", {"normalize_std": False})(
        batch, score_B, group_B, num_groups=num_groups
    )
    trained = (np.asarray(batch.loss_mask) > 0) & np.isin(number, (1, 5, 9))
    np.testing.assert_allclose(np.asarray(advantage)[trained], 0.5)


def test_more_branches_than_samples_lose_those_with_the_fewest_tokens():
    rows = [row(([5], 1)), row(([5], 1))]
    further = [row(([2], 0), ([6] * n, 1)) for n in (1, 3, 2)]
    completions = talk(prompts_of([2]), rows, [further, []])
    batch, _ = pack_completions(completions, PackedShape(1, 4, 1, 8))
    numbers = np.unique(np.asarray(batch.sequence)[np.asarray(batch.segment_ids) > 0])
    # Numbers 0 + 2 * 2 and 0 + 3 * 2 have 3 and 2 sampled tokens.
    assert numbers.tolist() == [0, 1, 4, 6]


def test_one_update_packs_as_many_branches_as_it_has_samples():
    """Its shape has no more room, whatever the other update leaves."""
    rows = [row(([5], 1))] * 4
    further = [row(([2] * (4 - n), 0), ([6] * n, 1)) for n in (1, 3, 2)]
    completions = talk(prompts_of([2, 3, 4], [2]), rows, [further, [], [], further[:1]])
    # Two updates of two samples and two branches, of up to 4 tokens each.
    shape = RowLimits(rows=1, tokens=4, longest=4).shape(8, minibatches=2)
    batch, _ = pack_completions(completions, shape)
    numbers = np.unique(np.asarray(batch.sequence)[np.asarray(batch.segment_ids) > 0])
    # Numbers 0 + 2 * 4 and 0 + 3 * 4 have 3 and 2 sampled tokens; 3 + 1 * 4 is of the other update.
    assert numbers.tolist() == [0, 1, 2, 3, 7, 8, 12]


def test_a_failed_agent_counts_in_no_baseline():
    rows = [row(([5], 1)), row(([5], 1)), row()]
    completions = talk(prompts_of([2]), rows, [[], [], []], failed=[False, False, True])
    batch, _ = pack_completions(completions, PackedShape(1, 4, 1, 8))
    group_B, num_groups = _groups(scored_of(completions))
    assert (group_B.tolist(), num_groups) == ([0, 0, -1], 1)
    advantage, _, _ = Estimator.of("grpo", {"normalize_std": False})(
        batch, np.array([1, 0, -9], np.float32), group_B, num_groups=num_groups
    )
    # The mean of 1 and 0.
    assert sorted(np.asarray(advantage)[np.asarray(batch.loss_mask) > 0]) == [-0.5, 0.5]


@pytest.mark.parametrize(
    "name",
    ["grpo", "grpo_batch_std", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"],
)
def test_no_estimator_depends_on_what_a_failed_agent_got(name):
    rows = [row(([5], 1)), row(([5, 6], 1)), row(), row(([4], 1)), row(([3], 1)), row()]
    failed = [False, False, True] * 2
    completions = talk(prompts_of([2], [3]), rows, [[]] * 6, failed=failed)
    batch, _ = pack_completions(completions, PackedShape(1, 8, 1, 8))
    group_B, num_groups = _groups(scored_of(completions))

    def advantage(of_failed: float) -> np.ndarray:
        reward_B = np.array([1, 0, of_failed, 1, 1, of_failed], np.float32)
        found = Estimator.of(name, {})(batch, reward_B, group_B, num_groups=num_groups)[0]
        return np.asarray(found)

    np.testing.assert_array_equal(advantage(0), advantage(100))
    assert advantage(0).any()


def test_graders_see_only_samples_that_agents_leave_to_them():
    class Asked:
        def submit(self, samples):
            self.asked = samples()
            return self

        def result(self):
            return [Verdict.of(True, "7") for _ in self.asked]

    rows = [row(([5], 1)), row(([6], 1)), row(([7], 1)), row()]
    completions = talk(
        prompts_of([2]),
        rows,
        [()] * 4,
        scores=[1, 0.25, np.nan, np.nan],
        failed=[False, False, False, True],
    )
    graders = Asked()
    verdicts = AskedVerdicts(graders, completions).result()  # pyright: ignore[reportArgumentType]
    assert [sample.tokens.tolist() for sample in graders.asked] == [[7]]
    assert [(v.score, v.correct) for v in verdicts] == [
        (1, True),
        (0.25, False),
        (1, True),
        (0, False),
    ]


@pytest.fixture(scope="module")
def actor() -> Actor:
    return actor_of("1-1-1")


def sampled(actor: Actor, context: np.ndarray, sample: int) -> np.ndarray:
    """A turn after a context, drawn with its own key, as an agent's request is."""
    seed = turn_seed(17, sample, context)
    prompt = prompts_of(context.tolist(), ids=[seed])
    return actor.generate(prompt, OPTIONS.replace(num_samples=1)).tokens[0][:2]


def test_turns_are_drawn_again_with_their_own_keys(actor):
    prompt = np.array([3, 4], np.int32)
    rows, branches = [], []
    for sample in range(2):
        first = sampled(actor, prompt, sample)[:1]
        second = sampled(actor, np.concatenate([prompt, first, [9]]), sample)
        rows.append(row((first.tolist(), 1), ([9], 0), (second.tolist(), 1)))
        # A thread of its own: a context that does not begin like the prompt.
        thread = np.array([9, 8, 7], np.int32)
        said = sampled(actor, thread, sample)
        branches.append([row((thread.tolist(), 0), (said.tolist(), 1))])
    completions = talk(prompts_of(prompt.tolist(), ids=[17]), rows, branches)
    assert fraction(actor, completions, OPTIONS) == 1
    # Keyed as plain responses, other tokens would be expected.
    assert fraction(actor, dataclasses.replace(completions, of_agents=None), OPTIONS) < 1


def test_a_failed_sample_makes_no_group_mixed():
    # Group 0: right, and one that failed. Group 1: right and wrong. Group 2: none that counts.
    rows = [row(([5], 1)), row(), row(([5], 1)), row(([5], 1)), row(), row()]
    failed = [False, True, False, False, True, True]
    completions = talk(prompts_of([2], [3], [4]), rows, [()] * 6, failed=failed)
    correct_B = np.array([True, False, True, False, False, False])
    score_B = np.array([1, 0, 1, 0.5, 0, 0], np.float32)
    scored = Scored(completions, correct_B, score_B, np.zeros(6, np.float32), (None,) * 6)
    assert kept_groups(scored, "correctness").tolist() == [False, True, False]
    assert kept_groups(scored, "score").tolist() == [False, True, False]


def test_reward_models_score_the_main_conversation():
    class Ones:
        """A model whose score of a sequence is its number of tokens."""

        def rows_of(self, shape):
            return {}

        def place(self, batch):
            return batch

        def scores_of(self, batch):
            return (batch.segment_ids > 0).astype(np.float32)

    # One row has room for one of these sequences, of 2 + 3 and 2 + 1 tokens, and the limits are for two.
    rows = [row(([5, 6, 7], 1)), row(([8], 1))]
    further = [row(([2, 3, 4], 0), ([6], 1))] * 2
    completions = talk(prompts_of([2, 3]), rows, [further, []])
    scores = SequenceScores(Ones(), RowLimits(rows=1, tokens=5, longest=5))  # pyright: ignore
    assert scores(completions).tolist() == [5, 3]
