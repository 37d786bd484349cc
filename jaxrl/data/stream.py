"""Endless shuffled streams of prompts and of worked solutions, with a position that can be saved.

    records -> rendered by the template -> tokenised once, all of them
                                             |
                  Grain: shuffle anew each epoch, repeat, number, batch -> Prompts

Tokens are in memory, so Grain shuffles row numbers and reads them in the calling thread: no worker
processes, nothing prefetched, nothing to lose. The order depends on the seed and on the number of
rows only. The state is what Grain keeps, the number of rows taken so far ({"next_index": 48}), plus
enough to notice that a checkpoint belongs to other data.
"""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

import grain
import numpy as np

from jaxrl.data.records import Record
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.types import Prompts

logger = logging.getLogger(__name__)

Overlong: TypeAlias = Literal["drop", "left", "error"]
Example: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Prompt tokens, and response tokens that end with end-of-sequence; both int32."""


class PromptStream:
    """Endless batches of `Prompts`, every prompt once an epoch, in a new order each epoch.

    `Prompts.ids_N` counts 0, 1, 2, ... through the whole stream. A batch may reach over the end of
    an epoch, and may be larger than the data set.

    Args:
      records: the problems.
      tokenizer: of the policy.
      prompts_per_batch: N.
      seed: of the order, below 2**32.
      max_prompt_tokens: longest prompt, template included.
      template: text around the problem, with "{prompt}" where it goes.
      chat: send the text through the tokenizer's chat template as one user message.
      overlong: what happens to longer prompts: "drop" leaves them out, "left" keeps their last
        `max_prompt_tokens` tokens, "error" refuses them.

    Raises:
      UserError: an argument breaks its rule, or no prompt is short enough.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        *,
        prompts_per_batch: int,
        seed: int,
        max_prompt_tokens: int,
        template: str = "{prompt}",
        chat: bool = False,
        overlong: Overlong = "drop",
    ):
        self._prompts = held_out_prompts(
            records,
            tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            template=template,
            chat=chat,
            overlong=overlong,
        )
        self._order = _ShuffledRows(
            len(self._prompts),
            rows_per_batch=prompts_per_batch,
            seed=seed,
            checksum=_checksum(self._prompts.tokens),
        )

    @property
    def num_prompts(self) -> int:
        """Prompts of one epoch."""
        return len(self._prompts)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompts:
        places, rows = next(self._order)
        return dataclasses.replace(self._prompts.take(rows), ids_N=places)

    def state(self) -> dict[str, int]:
        """Where the stream stands, for `restore`; plain JSON."""
        return self._order.state()

    def restore(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken. Another `prompts_per_batch` is allowed.

        Raises:
          UserError: the state belongs to other prompts or to another seed.
        """
        self._order.restore(state)


class SupervisedStream:
    """Endless batches of `Example`s from records that have solutions, reshuffled each epoch.

    Args:
      records: the problems; every one has a solution.
      tokenizer: of the model.
      examples_per_batch: length of each batch.
      seed: of the order, below 2**32.
      max_tokens: longest prompt and response together; longer examples are dropped.
      template, chat: as in `PromptStream`.

    Raises:
      UserError: an argument breaks its rule, a solution is missing, or no example is short enough.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        *,
        examples_per_batch: int,
        seed: int,
        max_tokens: int,
        template: str = "{prompt}",
        chat: bool = False,
    ):
        prompts = tokenizer.encode_batch(_render(records, tokenizer, template=template, chat=chat))
        responses = tokenizer.encode_batch([_solution(i, r) for i, r in enumerate(records)])
        eos = np.array([tokenizer.eos_id], np.int32)
        examples = [
            (prompt, np.concatenate([response, eos]))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        lengths = np.array([len(p) + len(r) for p, r in examples])
        kept = _drop_overlong(lengths, max_tokens, what="examples", setting="max_tokens")
        self._examples = [examples[i] for i in kept]
        self._order = _ShuffledRows(
            len(self._examples),
            rows_per_batch=examples_per_batch,
            seed=seed,
            checksum=_checksum(part for example in self._examples for part in example),
        )

    @property
    def num_examples(self) -> int:
        """Examples of one epoch."""
        return len(self._examples)

    def __iter__(self) -> SupervisedStream:
        return self

    def __next__(self) -> list[Example]:
        _, rows = next(self._order)
        return [self._examples[row] for row in rows]

    def state(self) -> dict[str, int]:
        """Where the stream stands, for `restore`; plain JSON."""
        return self._order.state()

    def restore(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken; see `PromptStream.restore`."""
        self._order.restore(state)


def held_out_prompts(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    template: str = "{prompt}",
    chat: bool = False,
    overlong: Overlong = "drop",
    limit: int | None = None,
) -> Prompts:
    """The records as prompts, in their own order, for evaluation.

    Args:
      records, tokenizer, max_prompt_tokens, template, chat, overlong: as in `PromptStream`.
      limit: take this many of the first that fit; None takes all.

    Returns:
      Prompts whose `ids_N` are the row numbers in `records`.

    Raises:
      UserError: as in `PromptStream`.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit} leaves no prompts; use at least 1, or None for all")
    if overlong not in get_args(Overlong):
        raise UserError(f"overlong is {overlong!r}; choose one of {', '.join(get_args(Overlong))}")
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens {max_prompt_tokens} leaves no prompt; use at least 1")
    texts = _render(records, tokenizer, template=template, chat=chat)
    tokens = tokenizer.encode_batch(texts)
    lengths = np.array([len(ids) for ids in tokens])
    if overlong == "error":
        _refuse_overlong(lengths, max_prompt_tokens)
    if overlong == "left":
        # A prompt's end holds the question and the opening of the answer; its start can go.
        tokens = tuple(ids[-max_prompt_tokens:] for ids in tokens)
        lengths = np.minimum(lengths, max_prompt_tokens)
    kept = _drop_overlong(lengths, max_prompt_tokens, what="prompts", setting="max_prompt_tokens")
    return Prompts(
        ids_N=np.arange(len(records), dtype=np.int64),
        tokens=tokens,
        texts=tuple(texts),
        answers=tuple(record.answer for record in records),
        sources=tuple(record.source for record in records),
    ).take(kept[:limit])


def render_prompt(prompt: str, tokenizer: Tokenizer, *, template: str, chat: bool) -> str:
    """The text that the model gets for a problem; see `PromptStream` for the arguments."""
    if "{prompt}" not in template:
        raise UserError(f"template {template!r} has no {{prompt}}, so every prompt would be alike")
    # Not str.format: templates write \boxed{} and other braces of their own.
    text = template.replace("{prompt}", prompt)
    return tokenizer.render_chat([{"role": "user", "content": text}]) if chat else text


class _ShuffledRows:
    """Endless batches of (place in the stream [N], row number [N]), both int64."""

    def __init__(self, num_rows: int, *, rows_per_batch: int, seed: int, checksum: int):
        if rows_per_batch < 1:
            raise UserError(f"a batch of {rows_per_batch} holds nothing; use at least 1")
        if not 0 <= seed < 2**32:
            raise UserError(f"data seed {seed} is out of range; use one from 0 to {2**32 - 1}")
        self._identity = {"num_rows": num_rows, "seed": seed, "checksum": checksum}
        self._iterator = iter(
            grain.MapDataset.range(num_rows)
            .shuffle(seed=seed)
            .repeat()
            .map_with_index(lambda place, row: (place, row))
            # Everything is in memory: threads would only wait for each other.
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
            # Batched last, so that the position counts rows and N may change on restart.
            .batch(rows_per_batch, batch_fn=lambda pairs: np.array(pairs, np.int64).T)
        )

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        places, rows = next(self._iterator)
        return places, rows

    def state(self) -> dict[str, int]:
        return {**self._identity, **self._iterator.get_state()}

    def restore(self, state: dict[str, int]) -> None:
        position = dict(state)
        theirs = {name: position.pop(name, None) for name in self._identity}
        if theirs != self._identity:
            raise UserError(
                f"the checkpoint's place is in other data: it has {theirs}, this run has "
                f"{self._identity}. Give back the data, template, tokenizer, length limit and data "
                "seed of that run, or start a new run from its weights"
            )
        self._iterator.set_state(position)


def _render(
    records: Sequence[Record], tokenizer: Tokenizer, *, template: str, chat: bool
) -> list[str]:
    if not len(records):
        raise UserError("there are no prompts; give a data set with at least one row")
    return [
        render_prompt(record.prompt, tokenizer, template=template, chat=chat) for record in records
    ]


def _solution(row: int, record: Record) -> str:
    if record.solution is None:
        raise UserError(
            f"row {row} of {record.source} has no solution to learn from; name the field that "
            "holds it (solution_field), or use a task that has solutions, such as chain_sum"
        )
    return record.solution


def _drop_overlong(lengths: np.ndarray, limit: int, *, what: str, setting: str) -> np.ndarray:
    """The rows that fit; says once how many do not."""
    kept = np.flatnonzero(lengths <= limit)
    if not len(kept):
        raise UserError(
            f"all {len(lengths)} {what} are longer than {setting} {limit}, the shortest has "
            f"{lengths.min()} tokens; raise {setting} or use another data set"
        )
    if len(kept) < len(lengths):
        logger.warning(
            "%d of %d %s dropped: longer than %s %d (the longest has %d tokens)",
            len(lengths) - len(kept),
            len(lengths),
            what,
            setting,
            limit,
            lengths.max(),
        )
    return kept


def _refuse_overlong(lengths: np.ndarray, limit: int) -> None:
    if lengths.max() > limit:
        row = int(lengths.argmax())
        raise UserError(
            f"row {row} has a prompt of {lengths[row]} tokens, and {int((lengths > limit).sum())} "
            f"rows are longer than max_prompt_tokens {limit}; raise it, or set overlong to drop or "
            "left"
        )


def _checksum(arrays: Iterable[np.ndarray]) -> int:
    checksum = 0
    for array in arrays:
        # The length too, or the same tokens cut elsewhere would look alike.
        checksum = zlib.crc32(
            array.tobytes(), zlib.crc32(len(array).to_bytes(8, "little"), checksum)
        )
    return checksum
