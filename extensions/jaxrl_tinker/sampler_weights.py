"""Weights of samplers, and the places on the devices from which adapters among them decode.

A place is one of a stack:

    place 0   nothing, the base model
    others    weights of samplers; those that no sample uses make room, the least recently used first

Weights that come to a place get a number that was never used, so nothing that is cached for the adapter
before them is found (`rollout.samples.Start`). Samplers of `kind: inflight` share a place, each with a number
of its own: new weights come to the place while samples decode, and these keep their keys and values.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import weakref
from collections.abc import Callable

from jaxrl.errors import UserError


@dataclasses.dataclass(eq=False)
class Newest:
    """The adapter of the newest save of `kind: inflight` of a model, for all its samplers of this kind.

    Attributes:
      saved: what was saved; None before the first save.
    """

    saved: SamplerWeights | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerWeights:
    """Weights to sample from, by name. They never change, but for those of `newest`.

    Attributes:
      folder: where they are; None if they are in memory only.
      path: their path, if a client has given them a name; else None.
      taken_by: request that copied them to the host's memory, where they are gone when they are dropped; ""
        if they are in files.
      newest: what it follows, if it is of `kind: inflight`.
    """

    folder: pathlib.Path | None = None
    path: str | None = None
    taken_by: str = ""
    newest: Newest | None = None

    @property
    def needs(self) -> str:
        """The request whose weights it has now, if they are in memory only; else ""."""
        saved = self.newest.saved if self.newest else self
        return saved.taken_by if saved else ""


@dataclasses.dataclass
class _Place:
    """One place of the stack.

    Attributes:
      number: the last number that was given here.
      shown: owner of the weights: one sampler, or all samplers that follow a model.
      saved: the weights.
      numbers: number of each sampler.
      calls: number of calls that sample with it now.
      last_use: number of the last call that took it.
    """

    number: int
    shown: SamplerWeights | Newest | None = None
    saved: SamplerWeights | None = None
    # Weak, so that samplers of ended sessions are forgotten.
    numbers: weakref.WeakKeyDictionary[SamplerWeights, int] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    calls: int = 0
    last_use: int = 0


class Places:
    """The places of a server. Only the sampler's thread uses them.

    Attributes:
      count: number of places.
    """

    def __init__(
        self, count: int, base: SamplerWeights, bring: Callable[[int, SamplerWeights], None]
    ):
        """Args: number of places; weights of the base model; function that fills a place."""
        self.count = count
        self._bring = bring
        self._places = [_Place(number) for number in range(count)]
        if count > 1:
            self._places[0].shown = base
            self._places[0].numbers[base] = 0
        self._uses = itertools.count(1)

    def take(self, weights: SamplerWeights) -> int | None:
        """The number of the adapter of a sampler, for a call; None if a place has to become free first."""
        shown = weights.newest or weights
        place = next((each for each in self._places if each.shown is shown), None)
        if place is None:
            # The first of several places is the base model's.
            free = [each for each in self._places[self.count > 1 :] if not each.calls]
            if not free:
                return None
            place = min(free, key=lambda each: each.last_use)
            self._load(place, shown)
            place.numbers.clear()
        if weights not in place.numbers:
            # A new number that `at` still maps to this place.
            place.number += self.count
            place.numbers[weights] = place.number
        place.calls += 1
        place.last_use = next(self._uses)
        return place.numbers[weights]

    def refresh(self) -> dict[int, Exception]:
        """Brings newer weights to the places of samplers that follow a model.

        Returns:
          The errors, by place. The next call loads the weights anew.
        """
        failed: dict[int, Exception] = {}
        for at, place in enumerate(self._places):
            if isinstance(place.shown, Newest) and place.saved is not place.shown.saved:
                try:
                    self._load(place, place.shown)
                except Exception as error:  # one model's failure is not the sampler's
                    failed[at] = error
        return failed

    def _load(self, place: _Place, shown: SamplerWeights | Newest) -> None:
        saved = shown.saved if isinstance(shown, Newest) else shown
        if saved is None:
            raise UserError("this sampler's weights are not saved yet; wait for the save before")
        # If it fails, the place must not pass for either of the two.
        place.shown = place.saved = None
        self._bring(self.at(place.number), saved)
        place.shown, place.saved = shown, saved

    def leave(self, number: int) -> None:
        self._places[self.at(number)].calls -= 1

    def at(self, number: int) -> int:
        """The place of a number."""
        return number % self.count
