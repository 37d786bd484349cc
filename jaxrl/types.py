"""Batch types shared by several packages: Prompts -> Completions -> Scored -> PackedBatch -> TrainBatch.

The first three live on the host; their sequences have different lengths, and they hold text. A PackedBatch
lives on the device: sequences packed into rows of equal length, arrays only. TrainBatch adds the fields
to train a policy, ValueBatch those to train a critic.

    N prompts in a step   G answers per prompt   B = N*G sequences
    U minibatches (optimiser updates) in a step   M microbatches of one update   R rows   T tokens of a row
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import numpy as np

Batch = TypeVar("Batch", bound="PackedBatch")
Row = TypeVar("Row", covariant=True)
Rows = TypeVar("Rows", "Prompts", "AgentRows", "Completions", "Scored")


def repeated(value: float, count: int, dtype: type) -> np.ndarray:
    """An array [count] of one value, which is a single number in memory. Read only."""
    return _endless(value, dtype)[:count]


# A slice takes a tenth of the time of `broadcast_to`, which counts with 100,000 samples.
@functools.lru_cache(256)
def _endless(value: float, dtype: type) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, dtype), 2**31)


class LazyRows(Sequence[Row]):
    """Rows that are made when they are read, by the thread that reads them."""

    def __init__(self, makers: Sequence[Callable[[], Row]]):
        """Args: a function for each row, which any thread may call, more than once."""
        self.makers = tuple(makers)

    def __len__(self) -> int:
        return len(self.makers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazyRows(self.makers[index])
        return self.makers[index]()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    # Equal to any sequence with the same rows, so there is no hash that would fit.
    __hash__ = None  # pyright: ignore[reportAssignmentType]


TRUTHS = "jaxrl.truths"
"""Field of `Prompts.extras` with all ground truths of a prompt that has several: any of them is right. Its
answer is the first one."""


@dataclasses.dataclass(frozen=True)
class Prompts:
    """N prompts of one generation batch.

    Example of one prompt: id 17, text "State the final answer ...: 23 + 60 - 71 =", answer "12".

    Attributes:
      ids_N: int64, seeds of sampling. In training the id is the prompt's position in the endless shuffled
        stream, so a prompt gets new samples in every epoch.
      tokens: N int32 arrays, the prompt as the model sees it.
      texts: N strings for people and reports; they are never tokenised again.
      answers: N ground truths, in the notation of the grader.
      sources: N names of data sets; metrics are reported per source.
      extras: N mappings with the other fields of the data rows, for graders and rewards; JSON types only.
        Empty mappings by default.
    """

    ids_N: np.ndarray
    tokens: tuple[np.ndarray, ...]
    texts: tuple[str, ...]
    answers: tuple[str, ...]
    sources: tuple[str, ...]
    extras: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self):
        if not self.extras:
            object.__setattr__(self, "extras", tuple({} for _ in self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def problem_key(self, n: int) -> str:
        """A text for problem n: its text, truth and other fields in short, the same in every run."""
        content = json.dumps([self.texts[n], self.answers[n], self.extras[n]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def take(self, indices: Sequence[int] | np.ndarray) -> Prompts:
        """The prompts at `indices`, in that order."""
        return _picked(self, indices)

    @staticmethod
    def concatenate(parts: Sequence[Prompts]) -> Prompts:
        """All prompts of `parts`, in order."""
        return _joined(parts) if parts else Prompts(np.zeros(0, np.int64), (), (), (), ())


class TurnText(NamedTuple):
    """A turn of a response: whether the policy or its environment wrote it, and its text."""

    by_policy: bool
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive tokens of a sample, on the host.

    Attributes:
      tokens: int32 [R].
      logprob: float32 [R], log-probability of each token under the sampler's distribution, with temperature;
        0 for tokens that were not sampled.
      entropy: float32 [R], entropy of that distribution in nats; 0 likewise.
      version: int32 [R], version of the weights that sampled each token; given as a number, that of all.
    """

    tokens: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray
    version: Any

    def __post_init__(self):
        if not isinstance(self.version, np.ndarray):
            version = repeated(self.version, len(self.tokens), np.int32)
            object.__setattr__(self, "version", version)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice | np.ndarray) -> Stretch:
        """The tokens in a slice, or where a mask is True."""
        return Stretch(*(x[part] for x in self.arrays))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.tokens, self.logprob, self.entropy, self.version

    @staticmethod
    def concatenate(parts: Sequence[Stretch]) -> Stretch:
        """The tokens of all `parts`, in order. If one part has them all, they are not copied."""
        arrays = [part.arrays for part in parts if len(part)] or [_NO_TOKENS.arrays]
        joined = map(np.concatenate, zip(*arrays, strict=True))
        return Stretch(*(joined if len(arrays) > 1 else arrays[0]))


_NO_TOKENS = Stretch(np.zeros(0, np.int32), *np.zeros((2, 0), np.float32), version=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Branch(Stretch):
    """A conversation of an agent's sample, of which a beginning may be trained elsewhere.

    Its tokens begin with the first one that the model saw.

    Attributes:
      mask: float32 [R], 1 on sampled tokens that no earlier branch of the sample trains.
      truncated: whether its last answer reached a limit.
    """

    mask: np.ndarray
    truncated: bool = False


@dataclasses.dataclass(frozen=True)
class AgentFailure:
    """Why the agent of a sample failed, and what was said until then.

    Attributes:
      message: the exception with the file and line of the user's code, or another reason.
      traceback: traceback of the exception; "" without one.
      said: conversations of the sample, the main one first. People read them; nothing is trained on them.
    """

    message: str
    traceback: str = ""
    said: tuple[Branch, ...] = ()


@dataclasses.dataclass(frozen=True)
class AgentRows:
    """What agents add to the B rows of completions.

    Attributes:
      score_B: float32, score that the agent gave its sample; NaN where the graders decide.
      failures: B failures of agents that raised, were late or said nothing; None for the others. A failed
        sample has no tokens, and counts in no baseline and no mean.
      branches: B tuples of further conversations; their tokens share the advantage of the sample.
    """

    score_B: np.ndarray
    failures: tuple[AgentFailure | None, ...]
    branches: tuple[tuple[Branch, ...], ...]


@dataclasses.dataclass(frozen=True)
class Completions:
    """G sampled answers to each of N prompts; row b answers prompt b // G and is its sample b % G.

    Example of one row, with the end-of-sequence token counted as a response token:

        prompt    5 + 7 - 3 =
        token     5    +    7    =    12   ;    12   -    3    =    9    ;  Answer: 9  <eos>
        logprob  -.1  -.0  -.0  -.0  -.3   ...

    Attributes:
      prompts: the N prompts.
      num_samples: G.
      tokens: B int32 arrays of response tokens, ending with end-of-sequence unless truncated.
      rollout_logprob: B float32 arrays, log-probability of each token under the sampler's distribution
        (temperature applied; among the tokens that limits keep, if `Truncation.renormalized`).
      entropy: B float32 arrays, entropy in nats of that distribution over the whole vocabulary.
      truncated_B: bool, True if the response reached its limit before end-of-sequence.
      texts: B decoded responses without special tokens. Those of a backend are made when they are read.
      mask: B float32 arrays, 1 on tokens sampled from the policy, 0 on tokens inserted by an environment. All
        1 by default.
      turns: B tuples of turns. By default each response is a single turn of the policy.
      started_B: int32, training step that started each response; its sampling keys use this step. All 0 by
        default.
      routes: B int16 arrays [P + R - 1, L, A], the experts that each token of the prompt and the response but
        the last took in the sampler; () if they are not kept.
      version: B int32 arrays, version of the weights that sampled each token; 0 on tokens that were not
        sampled. All 0 by default.
      of_agents: what agents add; None if the responses are the policy's alone.
      holder_B: int32, the group of processes (`mesh.replica_groups`) that has a row; -1 if all have it, which
        is the default. Others know its length alone: its tokens are -1 and its numbers NaN (`with_rows`).
      fetch: function of `with_rows`; None if all have all rows.
    """

    prompts: Prompts
    num_samples: int
    tokens: tuple[np.ndarray, ...]
    rollout_logprob: tuple[np.ndarray, ...]
    entropy: tuple[np.ndarray, ...]
    truncated_B: np.ndarray
    texts: Sequence[str]
    mask: tuple[np.ndarray, ...] = ()
    turns: Sequence[tuple[TurnText, ...]] = ()
    started_B: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    routes: tuple[np.ndarray, ...] = ()
    version: tuple[np.ndarray, ...] = ()
    of_agents: AgentRows | None = None
    holder_B: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    fetch: Callable[[Completions, np.ndarray], Completions] | None = None

    def __post_init__(self):
        if not len(self.holder_B):
            object.__setattr__(self, "holder_B", np.full(len(self.tokens), -1, np.int32))
        if not self.version:
            zeros = tuple(repeated(0, len(tokens), np.int32) for tokens in self.tokens)
            object.__setattr__(self, "version", zeros)
        if not len(self.started_B):
            object.__setattr__(self, "started_B", np.zeros(len(self.tokens), np.int32))
        if not self.mask:
            ones = tuple(repeated(1.0, len(tokens), np.float32) for tokens in self.tokens)
            object.__setattr__(self, "mask", ones)
        if not self.turns:
            # Without turns, graders would treat the environment's text as the policy's.
            assert all(mask.all() for mask in self.mask), "an environment spoke: give the turns"
            object.__setattr__(self, "turns", tuple((TurnText(True, t),) for t in self.texts))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths_B(self) -> np.ndarray:
        """The number of response tokens of each row, int64."""
        return np.array([len(t) for t in self.tokens], np.int64)

    @property
    def finished_B(self) -> np.ndarray:
        """Whether a sample has a response, bool; those of failed agents have none."""
        if self.of_agents is None:
            return np.ones(len(self), bool)
        return np.array([failure is None for failure in self.of_agents.failures], bool)

    @property
    def policy_texts(self) -> tuple[str, ...]:
        """The policy's text of each row, its turns joined by newlines."""
        return tuple(
            "\n".join(turn.text for turn in turns if turn.by_policy) for turns in self.turns
        )

    def branch(self, b: int) -> Branch:
        """The response of row b by itself; further conversations of an agent are in `of_agents`."""
        return Branch(
            self.tokens[b],
            self.rollout_logprob[b],
            self.entropy[b],
            self.version[b],
            self.mask[b],
            bool(self.truncated_B[b]),
        )

    def num_stale(self, version: int) -> int:
        """The number of sampled tokens of weights before `version`, further conversations included."""
        further = () if self.of_agents is None else itertools.chain(*self.of_agents.branches)
        everything = itertools.chain(map(self.branch, range(len(self))), further)
        return sum(int(((x.version < version) & (x.mask > 0)).sum()) for x in everything)

    def with_rows(self, wanted_B: np.ndarray | bool) -> Completions:
        """With the rows that this process wants, besides those that it has. Collective.

        Args:
          wanted_B: bool, another on each process.
        """
        return (
            self if self.fetch is None else self.fetch(self, np.broadcast_to(wanted_B, len(self)))
        )

    @property
    def prompt_index_B(self) -> np.ndarray:
        """The prompt index of each row, int64."""
        return np.repeat(np.arange(len(self.prompts)), self.num_samples)

    def rows_of(self, prompt_indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The rows that answer the given prompts, group after group."""
        first = np.asarray(prompt_indices, np.int64)[:, None] * self.num_samples
        return (first + np.arange(self.num_samples)).reshape(-1)

    def take(self, prompt_indices: Sequence[int] | np.ndarray) -> Completions:
        """The groups of the prompts at `prompt_indices`, in that order."""
        rows = self.rows_of(prompt_indices)
        prompts = self.prompts.take(prompt_indices)
        agents = self.of_agents and _picked(self.of_agents, rows)
        routes = tuple(self.routes[b] for b in rows) if self.routes else ()
        return _picked(
            self,
            rows,
            prompts=prompts,
            num_samples=self.num_samples,
            routes=routes,
            of_agents=agents,
            fetch=self.fetch,
        )

    @staticmethod
    def concatenate(parts: Sequence[Completions]) -> Completions:
        """All groups of `parts`, in order; every part has the same G, and either all or none have agents."""
        agents = [part.of_agents for part in parts if part.of_agents is not None]
        # A part may have no groups, and then no routes.
        has_routes = all(part.routes for part in parts if len(part))
        return _joined(
            parts,
            prompts=Prompts.concatenate([p.prompts for p in parts]),
            num_samples=parts[0].num_samples,
            routes=tuple(itertools.chain(*(p.routes for p in parts))) if has_routes else (),
            of_agents=_joined(agents) if agents else None,
            fetch=next((p.fetch for p in parts if p.fetch is not None), None),
        )


@dataclasses.dataclass(frozen=True)
class GraderFailure:
    """The reason why a response could not be graded. Such a response counts as wrong.

    Attributes:
      kind: "timeout", "died", "memory" or "raised".
      message: description for people.
    """

    kind: str
    message: str


@dataclasses.dataclass(frozen=True)
class Scored:
    """Completions with their rewards.

    Attributes:
      completions: the B rows.
      correct_B: bool, True if the answer is right. Dynamic sampling uses this, not the reward.
      score_B: float32, the grader's reward (DAPO eq. 7: +1 or -1), or a weighted sum of rewards; NaN for a
        sample that no reward has scored.
      shaping_B: float32, reward shaping by length (DAPO eq. 13: 0 down to -penalty).
      predictions: B extracted answers; None if the response contains none.
      term_BK: float32, the rewards whose weighted sum is the score, NaN where one has abstained. By default
        the score is the only one.
      term_weight_K: float32, weights of these rewards.
      failures: B grader failures, None where grading succeeded. None for all by default.
    """

    completions: Completions
    correct_B: np.ndarray
    score_B: np.ndarray
    shaping_B: np.ndarray
    predictions: tuple[str | None, ...]
    term_BK: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    term_weight_K: np.ndarray = dataclasses.field(default_factory=lambda: np.ones(1, np.float32))
    failures: tuple[GraderFailure | None, ...] = ()

    def __post_init__(self):
        if self.term_BK.ndim == 1:
            object.__setattr__(self, "term_BK", self.score_B[:, None])
        if not self.failures:
            object.__setattr__(self, "failures", (None,) * len(self.predictions))

    def __len__(self) -> int:
        return len(self.completions)

    def replace(self, **changes) -> Scored:
        return dataclasses.replace(self, **changes)

    @property
    def reward_B(self) -> np.ndarray:
        """The reward that advantages are computed from, float32."""
        return self.score_B + self.shaping_B

    @property
    def correct_NG(self) -> np.ndarray:
        """Correctness by group, bool."""
        return self.correct_B.reshape(-1, self.completions.num_samples)

    @property
    def counts_B(self) -> np.ndarray:
        """Whether a sample counts in baselines, means and the loss, bool.

        Those of failed agents do not, nor those that every reward has abstained from.
        """
        return self.completions.finished_B & ~np.isnan(self.score_B)

    @property
    def counts_NG(self) -> np.ndarray:
        """`counts_B` by group."""
        return self.counts_B.reshape(self.correct_NG.shape)

    @property
    def left_out(self) -> dict[str, int]:
        """How many samples do not count, by the metric that has their number; without agents or
        abstentions it has no such metric."""
        completions, counts = self.completions, {}
        if completions.of_agents is not None:
            counts["agent/failed"] = int((~completions.finished_B).sum())
        if abstained := int((completions.finished_B & ~self.counts_B).sum()):
            counts["reward/abstained"] = abstained
        return counts

    def differ_N(self, value_B: np.ndarray) -> np.ndarray:
        """Whether the values of a group's samples that count are not all equal, bool [N]."""
        counts_NG = self.counts_NG
        value_NG = value_B.reshape(counts_NG.shape)
        # What does not count is neither the highest nor the lowest. Where nothing counts, -inf > inf is
        # False.
        above_NG, below_NG = (np.where(counts_NG, value_NG, x) for x in (-np.inf, np.inf))
        return above_NG.max(axis=1) > below_NG.min(axis=1)

    def take(self, prompt_indices: Sequence[int] | np.ndarray) -> Scored:
        """The groups of the prompts at `prompt_indices`, in that order."""
        rows = self.completions.rows_of(prompt_indices)
        completions = self.completions.take(prompt_indices)
        return _picked(self, rows, completions=completions, term_weight_K=self.term_weight_K)

    @staticmethod
    def concatenate(parts: Sequence[Scored]) -> Scored:
        """All groups of `parts`, in order."""
        completions = Completions.concatenate([p.completions for p in parts])
        return _joined(parts, completions=completions, term_weight_K=parts[0].term_weight_K)


_PER_TOKEN = ("rollout_logprob", "old_logprob", "ref_logprob", "advantage")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Packed sequences of one step, on the device. Entry t of every field is about token t.

    Sequences 4 and 9 of the step, and padding, in one row of T = 10 (P prompt, r response):

        tokens        P P P r r P P r r r .      segment_ids   1 1 1 1 1 2 2 2 2 2 0
        positions     0 1 2 3 4 0 1 2 3 4 0      loss_mask     0 0 0 1 1 0 0 1 1 1 0
        sequence      4 4 4 4 4 9 9 9 9 9 0

    With shared prompts, the prompt is stored once without its last token. Each answer has its own segment,
    which begins with that last token (q is a token of another prompt):

        tokens        P P P r r P r r r q .      segment_ids   1 1 2 2 2 3 3 3 3 4 0
        positions     0 1 2 3 4 2 3 4 5 0 0      prefix_ids    0 0 1 1 1 1 1 1 1 0 0
        sequence      -1 -1 4 4 4 5 5 5 5 9 0

    Attributes:
      tokens, positions, segment_ids: int32 [U, M, R, T]; segment 0 is padding.
      sequence: int32 [U, M, R, T], index of the token's sequence in the step; -1 on shared prompts, 0 on
        padding. Of B sequences, number b + j * B is the j-th further conversation of sequence b, with its
        advantage.
      loss_mask: float32 [U, M, R, T], 1 on trained tokens, else 0.
      num_micro_U: int32 [U], number of microbatches that hold tokens; the others are skipped at run time.
      prefix_ids: int32 [U, M, R, T], the segment that a token attends to besides its own, 0 for none; None if
        prompts are not shared in this batch.
      routes: int16 [U, M, L * A, R, T], experts of each token, as in `Completions`; -1 for unknown ones. None
        without.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    sequence: jax.Array
    loss_mask: jax.Array
    num_micro_U: jax.Array
    prefix_ids: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    routes: jax.Array | None = dataclasses.field(default=None, kw_only=True)

    def replace(self, **changes) -> Self:
        return dataclasses.replace(self, **changes)

    def extended_as(self, kind: type[Batch], **further) -> Batch:
        """Converts this batch to a subtype with further fields."""
        return kind(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **further)

    def packing(self) -> dict[str, jax.Array]:
        """The fields of PackedBatch but routes by name, to build another type of batch over the same rows."""
        # Routes are the policy's alone, and by far the largest.
        names = (f.name for f in dataclasses.fields(PackedBatch) if f.name != "routes")
        return {name: getattr(self, name) for name in names}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch(PackedBatch):
    """The training batch of a policy.

    A log-probability at t is that of token t given the earlier tokens of its segment. The first token of a
    segment has none, and the field is 0.

    Attributes:
      rollout_logprob: float32 [U, M, R, T], log-probabilities of the sampler.
      old_logprob: float32 [U, M, R, T], log-probabilities of the trainer at the start of the step.
      ref_logprob: float32 [U, M, R, T], log-probabilities of the reference policy; 0 without a reference.
      advantage: float32 [U, M, R, T].
      weight: float32 [U, M, R, T], which multiplies the policy's loss of each token: its importance weight, 0
        if its entropy is too low (`algorithm.top_entropy_quantile`), else 1.
      old_value, target: those of a `ValueBatch`, for a policy with a value head; None for others.
    """

    rollout_logprob: jax.Array
    old_logprob: jax.Array
    ref_logprob: jax.Array
    advantage: jax.Array
    weight: jax.Array
    old_value: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    target: jax.Array | None = dataclasses.field(default=None, kw_only=True)

    @staticmethod
    def of(packed: PackedBatch, **fields) -> TrainBatch:
        """A packed batch with the given fields. By default fields are host arrays of 0, and weights 1."""
        shape = packed.tokens.shape
        others: dict[str, Any] = {name: np.zeros(shape, np.float32) for name in _PER_TOKEN}
        if "weight" not in fields:
            others["weight"] = np.ones(shape, np.float32)
        return TrainBatch(**packed.packing(), **(others | fields))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueBatch(PackedBatch):
    """The training batch of a critic.

    Attributes:
      old_value: float32 [U, M, R, T], the critic's values at the start of the step; entry t is the value of
        the state before token t.
      target: float32 [U, M, R, T], the return to predict.
    """

    old_value: jax.Array
    target: jax.Array


def _picked(batch: Rows, indices: Sequence[int] | np.ndarray, **others: Any) -> Rows:
    """`batch` with the rows at `indices` of every field but the given `others`."""
    # An empty list would index as floats.
    chosen = np.asarray(indices, np.int64)

    def pick(rows: Any) -> Any:
        if isinstance(rows, np.ndarray):
            return rows[chosen]
        if isinstance(rows, LazyRows):
            return LazyRows(pick(rows.makers))
        return tuple(rows[i] for i in chosen.tolist())

    fields = {name: pick(rows) for name, rows in vars(batch).items() if name not in others}
    return type(batch)(**fields, **others)


def _joined(parts: Sequence[Rows], **others: Any) -> Rows:
    """The rows of all `parts` in order, in every field but the given `others`."""

    def join(rows: list[Any]) -> Any:
        if isinstance(rows[0], np.ndarray):
            return np.concatenate(rows)
        # Joined texts stay unmade unless a part has made its own. One without rows has none to make.
        rows = [part for part in rows if len(part)] or rows[:1]
        if all(isinstance(part, LazyRows) for part in rows):
            return LazyRows(join([part.makers for part in rows]))
        return tuple(itertools.chain(*rows))

    names = [name for name in vars(parts[0]) if name not in others]
    fields = {name: join([getattr(part, name) for part in parts]) for name in names}
    return type(parts[0])(**fields, **others)
