"""Arguments and results of the engine's programs: sequences with their cache, and slots that decode.

n slots   P sequences of a prefix   C capacity of a slot   R response tokens   W tokens of a dispatch
"""

from __future__ import annotations

import dataclasses

import jax

from jaxrl.models.cache.interface import Cache
from jaxrl.rollout.sampling import Truncation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Sequences with their cache. The last token of each is not in the cache yet; the next step runs it.

    Example, the sequence 5 6 7 with C = 4: history 5 6 0 0, length 2, token 7.

    Attributes:
      cache: keys and values of all layers for C tokens, as the engine's `CacheKind` has them.
      history: int32 [P, C], the cached tokens.
      length: int32 [P], number of cached tokens.
      token: int32 [P], the last token.
    """

    cache: Cache
    history: jax.Array
    length: jax.Array
    token: jax.Array

    @property
    def capacity(self) -> int:
        """C, the number of tokens that a sequence has room for."""
        return self.history.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignment:
    """The samples that `insert` starts, with one entry per slot.

    Attributes:
      source: int32 [n], index into the prefix, or -1 to leave the slot alone.
      prompt_id, sample_index: int32 [n], parts of the sampling key.
      limit: int32 [n], response tokens at which the slot stops, at most R.
      count: int32 [n], response tokens that the prefix has already.
    """

    source: jax.Array
    prompt_id: jax.Array
    sample_index: jax.Array
    limit: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All slots, with the samples in them.

    Attributes:
      context: the sequences.
      key: uint32 [n, 2].
      temperature: float32 [n]; 0 is greedy.
      truncation: which tokens may be drawn, fields [n].
      count: int32 [n], response tokens so far.
      limit: int32 [n].
      active: bool [n], still decoding.
      out_count: int32 [n], tokens decoded by the last dispatch.
      out_token: int32 [n, W]; out_logprob, out_entropy: float32 [n, W], of which `out_count` are real.
    """

    context: Prefix
    key: jax.Array
    temperature: jax.Array
    truncation: Truncation
    count: jax.Array
    limit: jax.Array
    active: jax.Array
    out_count: jax.Array
    out_token: jax.Array
    out_logprob: jax.Array
    out_entropy: jax.Array

    @property
    def num_slots(self) -> int:
        """The number of slots, n."""
        return self.active.shape[0]

    @property
    def capacity(self) -> int:
        """C, the number of tokens that a slot has room for."""
        return self.context.capacity

    def replace(self, **changes) -> DecodeState:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)
