"""An endless stream of prompts of several sources, with a position that can be saved.

    records --encode_prompts--> Prompts of one source      --+
    GeneratedProblems, as they are drawn: GeneratedPrompts           --+--PromptStream--> batches of N, mixed by weight

Prompts in memory are rendered and tokenised once, ahead of training, and taken in the order of `shuffling`;
a step then takes rows that are ready. What is made is rendered when it is drawn, as its number is.

A source stands at a turn, a number that only grows (`prompt_sources`). With a curriculum turns of problems
that the policy solves always or never are mostly passed over.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxrl.data.messages import PLAIN_FORMAT, PromptFormat, render_context
from jaxrl.data.pass_rates import Curriculum, PassRates
from jaxrl.data.prompt_sources import GeneratedPrompts, ShuffledPrompts
from jaxrl.data.records import Record
from jaxrl.data.shuffling import check_order, check_same_data, drop_overlong
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts

# A text of more than twice so many characters is tokenised at its ends first. Tokens of prose and code have
# 3 to 5 characters.
_CHARS_PER_TOKEN = 32
_LEAST_CHARS = 1 << 16

Overlong: TypeAlias = Literal["drop", "left", "right", "middle", "error"]


class PromptStream:
    """Endless batches of `Prompts`, every prompt in memory once an epoch, in a new order each epoch.

    `Prompts.ids_N` differ through the whole stream; those of one source without a curriculum count 0, 1, 2,
    ... A batch may reach over the end of an epoch, and may be larger than the data set.

    Args:
      sources: prompts of each source, or what makes them.
      weights: of the sources: of any stretch of the stream each has its share. An epoch of one then ends
        when it ends, whatever the others do.
      prompts_per_batch: N.
      seed: of the order, below 2**32.
      curriculum: draws by how often a problem was solved; None draws every one.

    Raises:
      UserError: an argument breaks its rule.
    """

    def __init__(
        self,
        sources: Sequence[Prompts | GeneratedPrompts],
        *,
        prompts_per_batch: int,
        seed: int,
        weights: Sequence[float] = (1.0,),
        curriculum: Curriculum | None = None,
    ):
        assert len(sources) == len(weights), "every source has a weight"
        check_order(prompts_per_batch, seed)
        seeds = _seeds(seed, len(sources))
        self._sources = [
            ShuffledPrompts(source, own, curriculum) if isinstance(source, Prompts) else source
            for source, own in zip(sources, seeds, strict=True)
        ]
        self._prompts_per_batch = prompts_per_batch
        self._weights = tuple(weights)
        identities = [source.identity for source in self._sources]
        self._identity = {"seed": seed, "sources": identities, "weights": list(weights)}
        # Of each source: its next turn, and the prompts drawn so far, fewer if turns were passed over.
        self._turns = [0] * len(sources)
        self._num_drawn = [0] * len(sources)
        # Ids of prompts to draw once more, before others.
        self._again: list[int] = []

    @property
    def num_prompts(self) -> int:
        """Prompts of all sources that are in memory."""
        return sum(len(source) for source in self._shuffled)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompts:
        return Prompts.concatenate([self._draw() for _ in range(self._prompts_per_batch)])

    def state(self, *, again: Sequence[int] | np.ndarray = ()) -> dict[str, Any]:
        """Where the stream stands, and what it knows of its problems, for `restore`; plain JSON.

        Args:
          again: ids of prompts that were drawn, and are to be drawn again first of all.
        """
        return {
            **self._identity,
            "turns": list(self._turns),
            "num_drawn": list(self._num_drawn),
            "again": [*map(int, again), *self._again],
            "pass_rates": [rates.state() for rates in self._pass_rates],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. Another `prompts_per_batch` is allowed, and another curriculum.

        Raises:
          UserError: the state belongs to other prompts, to other weights or to another seed.
        """
        check_same_data({name: state.get(name) for name in self._identity}, self._identity)
        self._turns, self._num_drawn = list(state["turns"]), list(state["num_drawn"])
        self._again = list(state["again"])
        # A run that had no curriculum knows nothing of its problems.
        for rates, stored in zip(self._pass_rates, state["pass_rates"], strict=False):
            rates.restore(stored)

    def learn(self, ids_N: np.ndarray, correct_NG: np.ndarray) -> None:
        """Takes in, for the curriculum, how the answers to prompts of this stream were graded.

        Args:
          ids_N: of the prompts.
          correct_NG: which of the answers to each are right.
        """
        for prompt_id, correct_G in zip(ids_N.tolist(), correct_NG, strict=True):
            source, turn = self._source_and_turn(prompt_id)
            if isinstance(source, ShuffledPrompts):
                source.learn(turn, int(correct_G.sum()), len(correct_G))

    def metrics(self) -> dict[str, float]:
        """What is known of the problems; nothing without a curriculum."""
        return PassRates.metrics(self._pass_rates) if self._pass_rates else {}

    def counts(self) -> dict[str, int]:
        """Turns that were passed over since the stream began."""
        over = [t - n for t, n in zip(self._turns, self._num_drawn, strict=True)]
        pairs = list(zip(self._sources, over, strict=True))
        found = {}
        if self._pass_rates:
            found["curriculum/skipped"] = sum(
                n for source, n in pairs if isinstance(source, ShuffledPrompts)
            )
        if any(isinstance(source, GeneratedPrompts) for source in self._sources):
            found["data/made_problems_left_out"] = sum(
                n for source, n in pairs if isinstance(source, GeneratedPrompts)
            )
        return found

    @property
    def _shuffled(self) -> list[ShuffledPrompts]:
        return [source for source in self._sources if isinstance(source, ShuffledPrompts)]

    @property
    def _pass_rates(self) -> list[PassRates]:
        return [source.pass_rates for source in self._shuffled if source.pass_rates is not None]

    def _source_and_turn(self, prompt_id: int) -> tuple[ShuffledPrompts | GeneratedPrompts, int]:
        turn, number = divmod(prompt_id, len(self._sources))
        return self._sources[number], turn

    def _draw(self) -> Prompts:
        """The next prompt."""
        if self._again:
            prompt_id = self._again.pop(0)
            source, turn = self._source_and_turn(prompt_id)
            prompt = source.prompt(turn)
            assert prompt is not None, "it was drawn before, and is what it was"
        else:
            prompt_id, prompt = self._draw_new()
        return dataclasses.replace(prompt, ids_N=np.array([prompt_id], np.int64))

    def _draw_new(self) -> tuple[int, Prompts]:
        # Whose share is the most behind, the first of several.
        due = [(n + 1) / w for n, w in zip(self._num_drawn, self._weights, strict=True)]
        number = due.index(min(due))
        turn, prompt = self._sources[number].draw(self._turns[number])
        self._turns[number] = turn + 1
        self._num_drawn[number] += 1
        return turn * len(self._sources) + number, prompt


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """Prompts of a source, and what they were before any was cut or left out.

    Attributes:
      prompts: those that fit; `ids_N` are their row numbers.
      lengths: int64, tokens of every row, before it was cut; of a text far beyond the limit those of its two
        ends.
      num_cut: rows that were cut to fit.
    """

    prompts: Prompts
    lengths: np.ndarray
    num_cut: int

    @property
    def num_dropped(self) -> int:
        """Rows that did not fit and were left out."""
        return len(self.lengths) - len(self.prompts)


def encode_prompts(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    prompt_format: PromptFormat = PLAIN_FORMAT,
    overlong: Overlong = "drop",
    setting: str = "max_prompt_tokens",
) -> EncodedPrompts:
    """The records as prompts, in their own order.

    Args:
      records: the problems.
      tokenizer: of the policy.
      max_prompt_tokens: longest prompt, template and answer prefix included.
      prompt_format: how a problem becomes a prompt.
      overlong: what happens to longer prompts: "drop" leaves them out, "left" cuts them from the left, which
        keeps the question's end and the opening of the answer, "right" from the right, "middle" keeps both
        ends, "error" refuses them.
      setting: name of the limit, for messages.

    Raises:
      UserError: an argument breaks its rule, a conversation cannot be rendered, or no prompt fits.
    """
    _check_limits(overlong, max_prompt_tokens)
    if not len(records):
        raise UserError("there are no prompts; give a data set with at least one row")
    encoded = _encoded(records, tokenizer, max_prompt_tokens, prompt_format, overlong)
    if encoded.num_dropped:
        drop_overlong(encoded.lengths, max_prompt_tokens, what="prompts", setting=setting)
    return encoded


def prompt_encoder(
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    prompt_format: PromptFormat = PLAIN_FORMAT,
    overlong: Overlong = "drop",
) -> Callable[[Record], Prompts | None]:
    """What makes the prompt of one record, None where it does not fit; arguments as of `encode_prompts`."""
    _check_limits(overlong, max_prompt_tokens)

    def encode(record: Record) -> Prompts | None:
        encoded = _encoded([record], tokenizer, max_prompt_tokens, prompt_format, overlong)
        return encoded.prompts if len(encoded.prompts) else None

    return encode


def _check_limits(overlong: Overlong, max_prompt_tokens: int) -> None:
    if overlong not in get_args(Overlong):
        raise UserError(f"overlong is {overlong!r}; choose one of {', '.join(get_args(Overlong))}")
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens {max_prompt_tokens} leaves no prompt; use at least 1")


def _encoded(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    prompt_format: PromptFormat,
    overlong: Overlong,
) -> EncodedPrompts:
    """Those that fit, perhaps none."""
    texts = [render_context(record.prompt, tokenizer, prompt_format) for record in records]
    tokens = _tokens(texts, tokenizer, max_prompt_tokens)
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    if overlong == "error":
        _refuse_overlong(lengths, texts, max_prompt_tokens)
    num_cut = 0
    if overlong in ("left", "right", "middle"):
        num_cut = int((lengths > max_prompt_tokens).sum())
        tokens = tuple(_cut(ids, max_prompt_tokens, overlong) for ids in tokens)
    kept = [row for row, ids in enumerate(tokens) if len(ids) <= max_prompt_tokens]
    prompts = Prompts(
        ids_N=np.arange(len(records), dtype=np.int64),
        tokens=tokens,
        texts=tuple(texts),
        answers=tuple(record.answer for record in records),
        sources=tuple(record.source for record in records),
        extras=tuple(record.extra for record in records),
    ).take(kept)
    return EncodedPrompts(prompts, lengths, num_cut)


def _reach(max_prompt_tokens: int) -> int:
    return max(_LEAST_CHARS, _CHARS_PER_TOKEN * max_prompt_tokens)


def _tokens(
    texts: Sequence[str], tokenizer: Tokenizer, max_prompt_tokens: int
) -> tuple[np.ndarray, ...]:
    """The tokens of each text; of one far beyond the limit those of its ends, each beyond the limit alone.

    Whether such a text is cut or left out, its middle is not needed. The ends have to show that it is too
    long, since a tokenizer may make few tokens of many characters.
    """
    reach = _reach(max_prompt_tokens)
    far = [row for row, text in enumerate(texts) if len(text) > 2 * reach]
    starts = tokenizer.encode_batch([texts[row][:reach] for row in far])
    ends = tokenizer.encode_batch([texts[row][-reach:] for row in far])
    found = {
        row: np.concatenate([start, end])
        for row, start, end in zip(far, starts, ends, strict=True)
        if min(len(start), len(end)) > max_prompt_tokens
    }
    others = [row for row in range(len(texts)) if row not in found]
    found |= zip(others, tokenizer.encode_batch([texts[row] for row in others]), strict=True)
    return tuple(found[row] for row in range(len(texts)))


def evaluation_prompts(sources: Sequence[EncodedPrompts]) -> Prompts:
    """Prompts of all evaluation sets, one after the other.

    Their `ids_N`, which seed the sampling, are row numbers through all of the sets.
    """
    starts = [0, *itertools.accumulate(len(source.lengths) for source in sources)]
    return Prompts.concatenate(
        [
            dataclasses.replace(source.prompts, ids_N=source.prompts.ids_N + start)
            for source, start in zip(sources, starts, strict=False)
        ]
    )


def _seeds(seed: int, num_sources: int) -> list[int]:
    """Of the orders of sources, of which those of one length would otherwise be shuffled alike."""
    if num_sources == 1:
        return [seed]
    return [
        int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        for number in range(num_sources)
    ]


def _cut(ids: np.ndarray, limit: int, side: Overlong) -> np.ndarray:
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    # The middle goes: the longer half of what stays is the end, where the question is.
    start = limit if side == "right" else limit // 2
    return np.concatenate([ids[:start], ids[len(ids) - (limit - start) :]])


def _refuse_overlong(lengths: np.ndarray, texts: Sequence[str], limit: int) -> None:
    if lengths.max() > limit:
        row = int(lengths.argmax())
        more = " or more" if len(texts[row]) > 2 * _reach(limit) else ""
        raise UserError(
            f"row {row} has a prompt of {lengths[row]} tokens{more}, and {int((lengths > limit).sum())} "
            f"rows are longer than max_prompt_tokens {limit}; raise it, or set overlong to drop, left, "
            "right or middle"
        )
