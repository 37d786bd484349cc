"""Brings samples of other processes to those that want them, over the devices (`mesh.replica_groups`).

finished      Completions.with_rows     an update wants those of its own rows
unfinished    UnfinishedGroups.whole    a checkpoint wants all
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.mesh.replica_groups import ReplicaGroups
from jaxrl.rollout.backend import DecodeTexts
from jaxrl.rollout.samples import Sample, Texts, UnfinishedGroups
from jaxrl.types import Completions, LazyRows, Prompts


def fetch_rows(
    groups: ReplicaGroups,
    decode_texts: DecodeTexts,
    completions: Completions,
    wanted_B: np.ndarray,
) -> Completions:
    """Brings samples to the processes that want them: `Completions.with_rows`. Collective.

    Args:
      groups: the groups of processes, of which one has sampled each row.
      decode_texts: function from token ids to texts.
      completions: samples of all groups, the same ones on every process.
      wanted_B: bool, the rows that this process wants.
    """
    assert completions.of_agents is None, "all processes sample the sessions of agents together"
    names = ["tokens", "rollout_logprob", "entropy", *(["routes"] if completions.routes else [])]
    fields = {name: list(getattr(completions, name)) for name in names}
    bytes_FB = np.array([[x.nbytes for x in rows] for rows in fields.values()], np.int64)
    words_B = -(-bytes_FB.sum(axis=0) // 4)
    # A row is its fields one after another, in whole words.
    contents, chosen, ranges = {}, [], []
    for g in range(len(groups.processes)):
        of_group = np.flatnonzero(completions.holder_B == g)
        ends = np.cumsum(words_B[of_group])
        starts = ends - words_B[of_group]
        wanted = wanted_B[of_group] & (g not in groups.here)
        chosen += of_group[wanted].tolist()
        ranges.append(np.stack([starts, ends], axis=1)[wanted])
        if g in groups.here:
            contents[g] = content = np.zeros(words_B[of_group].sum(), np.int32)
            for b, start in zip(of_group.tolist(), (4 * starts).tolist(), strict=True):
                row = np.concatenate([x[b].reshape(-1).view(np.uint8) for x in fields.values()])
                content.view(np.uint8)[start : start + len(row)] = row
    found = np.concatenate(groups.gather(contents, ranges))
    for b, row in zip(chosen, np.split(found, np.cumsum(words_B[chosen])), strict=False):
        row = row.view(np.uint8)
        for rows in fields.values():
            like = rows[b]
            rows[b] = row[: like.nbytes].view(like.dtype).reshape(like.shape)
            row = row[like.nbytes :]
    made = Texts([fields["tokens"][b] for b in chosen], decode_texts)
    texts, turns = (
        [functools.partial(x.__getitem__, b) for b in range(len(completions))]
        for x in (completions.texts, completions.turns)
    )
    for i, b in enumerate(chosen):
        texts[b], turns[b] = functools.partial(made.text, i), functools.partial(made.turns, i)
    return dataclasses.replace(
        completions,
        **{name: tuple(rows) for name, rows in fields.items()},
        texts=LazyRows(texts),
        turns=LazyRows(turns),
    )


def fetch_unfinished(
    groups: ReplicaGroups, samples: Sequence[Sample], wanted: bool
) -> list[Sample]:
    """Copies of samples, with the tokens that other processes have: `UnfinishedGroups.whole`. Collective.

    Args:
      groups: the groups of processes.
      samples: the samples, the same ones on every process, however many tokens this one knows of.
      wanted: whether this process wants them; else they stay as they are.
    """
    contents = {g: _packed([s for s in samples if s.holder == g]) for g in groups.here}
    nothing = np.zeros((0, 2), int)
    found = groups.gather(contents, None if wanted else [nothing] * len(groups.meshes))
    if not wanted:
        return list(samples)
    of_group = [iter(_unpacked(content)) for content in found]
    whole = []
    for sample in samples:
        brought = sample if sample.holder < 0 else next(of_group[sample.holder])
        whole.append(brought.at(sample.prompt))
        whole[-1].holder = -1
    return whole


def _packed(samples: Sequence[Sample]) -> np.ndarray:
    """Samples as int32 words, exact to the bit."""
    record = UnfinishedGroups(Prompts.concatenate([]), 1, tuple(samples)).record()
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {k: x for k, x in record.items() if isinstance(x, np.ndarray)}
    np.savez(buffer, **arrays)
    # A reader of zip files finds their end however many bytes come after it.
    return np.frombuffer(buffer.getvalue() + bytes(-buffer.tell() % 4), np.int32)


def _unpacked(words: np.ndarray) -> tuple[Sample, ...]:
    empty = UnfinishedGroups(Prompts.concatenate([]), 1, ()).record()
    arrays = dict(np.load(io.BytesIO(words.tobytes()), allow_pickle=False))
    sessions = [None] * len(arrays["lengths"])
    return UnfinishedGroups.of_record({**empty, **arrays, "sessions": sessions}).samples
