"""The adapters that samples decode with: places of one stack on the devices, one for each sampler's weights.

    place 0   nothing, the base model
    others    weights of samplers; those that no sample uses make room, the least recently used first

Weights that come to a place get a number that was never used, so that nothing cached under the adapter before
them is found (`rollout.samples.Start`).
"""

from __future__ import annotations

import dataclasses
import itertools

import jax

from jaxrl.models import lora
from jaxrl.models.decoder import Params
from jaxrl.tinker.sampler_weights import SamplerWeights


@dataclasses.dataclass
class _Place:
    """A place, the number of its adapter, and the calls that sample with it."""

    number: int
    weights: SamplerWeights | None = None
    calls: int = 0
    last_use: int = 0


class AdapterPlaces:
    """Places of adapters. Only the sampler's thread uses them."""

    def __init__(self, frozen: Params, stack: Params, base: SamplerWeights):
        """Args: the base model's weights; a stack of empty adapters; what samplers of the base model name."""
        self._frozen = frozen
        self.stack = stack
        count = jax.tree.leaves(stack)[0].shape[1]
        self._places = [_Place(number) for number in range(count)]
        self._places[0].weights = base
        self._uses = itertools.count(1)
        where = jax.tree.map(lambda x: x.sharding, stack)
        # Not donated: the loop may be about to use the stack as it is.
        self._put = jax.jit(lora.put_into, out_shardings=where)
        self._taken = jax.jit(lora.taken_from)

    @property
    def params(self) -> Params:
        """All weights, with the stack."""
        return lora.join(self.stack, self._frozen)

    def take(self, weights: SamplerWeights) -> int | None:
        """The number of the adapter of a sampler, for a call; None if a place has to become free first."""
        place = next((each for each in self._places if each.weights is weights), None)
        if place is None:
            free = [each for each in self._places[1:] if not each.calls]
            if not free:
                return None
            place = min(free, key=lambda each: each.last_use)
            at = place.number % len(self._places)
            self.stack = self._put(self.stack, weights.load(), at)
            place.weights = weights
            place.number += len(self._places)
        place.calls += 1
        place.last_use = next(self._uses)
        return place.number

    def leave(self, number: int) -> None:
        """Ends a call."""
        self._places[number % len(self._places)].calls -= 1

    def params_of(self, number: int) -> Params:
        """The model with one adapter, for the trainer's forward pass."""
        return lora.join(self._taken(self.stack, number % len(self._places)), self._frozen)
