"""Arguments and results of the engine's programs: sequences with their cache, and slots that decode.

n slots   P sequences of a prefix   C capacity of a slot   R response tokens   W tokens of a dispatch
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from jaxrl.models.cache.cache_kind import Cache
from jaxrl.rollout.sampling import Truncation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Sequences with their cache. The last token of each is not cached yet; the next decode step runs it.

    Example, the sequence 5 6 7 with C = 4: history 5 6 0 0, length 2, token 7.

    Attributes:
      cache: keys and values of all layers for C tokens, as the engine's `CacheKind` has them.
      history: int32 [P, C], the tokens in the cache.
      length: int32 [P], number of cached tokens.
      token: int32 [P], the last token.
    """

    cache: Cache
    history: jax.Array
    length: jax.Array
    token: jax.Array

    @property
    def capacity(self) -> int:
        return self.history.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignment:
    """The samples that `insert` starts, one entry per slot.

    Attributes:
      source: int32 [n], index of the sequence in the prefix; -1 leaves the slot unchanged.
      prompt_id, sample_index: int32 [n], parts of the sampling key.
      limit: int32 [n], response length at which the slot stops, at most R.
      count: int32 [n], number of response tokens that the prefix already holds.
    """

    source: jax.Array
    prompt_id: jax.Array
    sample_index: jax.Array
    limit: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodedTokens:
    """The tokens of a dispatch, on the devices or on the host.

    Attributes:
      count: int32 [n], number of decoded tokens.
      token: int32 [n, W], of which the first `count` are valid.
      logprob, entropy: float32 [n, W], likewise.
    """

    count: Any
    token: Any
    logprob: Any
    entropy: Any


class TopTokens(NamedTuple):
    """The most probable tokens at each place, most probable first.

    They are of the whole vocabulary, with the temperature and without edits, as `DecodedTokens.logprob`.

    Attributes:
      token: int32 [n, W, K], on the devices or on the host; [R, K] for one sample.
      logprob: float32, likewise.
    """

    token: Any
    logprob: Any


class TokenScores(NamedTuple):
    """What the model says of known tokens, each given those before it, at temperature 1.

    Attributes:
      logprob: float32 [P, T], on the devices; [T] on the host for one sequence.
      rank: int32, the token's place among all of the vocabulary; 1 for the most probable.
      top: the most probable tokens.
    """

    logprob: Any
    rank: Any
    top: TopTokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All slots and the samples in them.

    Attributes:
      context: the sequences and their cache.
      key: uint32 [n, 2], sampling key of each sample.
      temperature: float32 [n]; 0 is greedy.
      truncation: limits on the tokens that can be drawn, fields [n].
      count: int32 [n], response tokens so far.
      limit: int32 [n], response length at which the slot stops.
      active: bool [n], whether the slot still decodes.
      stops: bool [n], whether stop ids end the sample.
      decoded: tokens of the last dispatch.
    """

    context: Prefix
    key: jax.Array
    temperature: jax.Array
    truncation: Truncation
    count: jax.Array
    limit: jax.Array
    active: jax.Array
    stops: jax.Array
    decoded: DecodedTokens

    @property
    def num_slots(self) -> int:
        return self.active.shape[0]

    @property
    def capacity(self) -> int:
        return self.context.capacity

    def replace(self, **changes) -> DecodeState:
        return dataclasses.replace(self, **changes)
