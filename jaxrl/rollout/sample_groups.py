"""The samples of a call to a backend, in groups: one group per prompt.

Example, G = 2, one unfinished group of an earlier call, then `add` with the prompts "p", "q":

    group 0   the unfinished group; its samples keep their tokens
    group 1   p: two samples without tokens
    group 2   q: two samples without tokens

N prompts   G samples of each
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.errors import UserError
from jaxrl.rollout.backend import DecodeText, OnGroup, SamplingOptions
from jaxrl.rollout.samples import Rollout, Sample, UnfinishedGroups, completions_of
from jaxrl.types import Completions, Prompts


class SampleGroups:
    """Groups of samples; unfinished groups of an earlier call come first.

    Attributes:
      samples: N * G samples, group by group.
    """

    def __init__(
        self,
        options: SamplingOptions,
        decode_text: DecodeText,
        unfinished: UnfinishedGroups | None = None,
    ):
        """Args: those of `RolloutBackend.resume`; `unfinished` is copied.

        Raises:
          UserError: the unfinished groups have another number of samples.
        """
        self._num_samples = options.num_samples
        self._step = options.step
        self._decode_text = decode_text
        # One for each group, so that it takes the same time to add one to few groups or to many.
        self._prompts: list[Prompts] = []
        self.samples: list[Sample] = []
        if unfinished is not None:
            _check_size(unfinished, self._num_samples)
            self._prompts += [unfinished.prompts.take([n]) for n in range(len(unfinished.prompts))]
            self.samples += [sample.at(sample.prompt) for sample in unfinished.samples]
        # Decoding long responses to text is slow. The cache serves both `hand_out` and the result.
        self._completions: dict[int, Completions] = {}

    def add(self, prompts: Prompts) -> range:
        """Adds a group without tokens for each prompt; returns their indices."""
        new = range(len(self), len(self) + len(prompts))
        self._prompts += [prompts.take([n]) for n in range(len(prompts))]
        self.samples += [Sample(n, k, self._step) for n in new for k in range(self._num_samples)]
        return new

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, n: int) -> Prompts:
        """The prompt of group n."""
        return self._prompts[n]

    def group(self, n: int) -> list[Sample]:
        """The samples of group n."""
        return self.samples[n * self._num_samples : (n + 1) * self._num_samples]

    def finished(self, n: int) -> bool:
        """Whether all samples of group n are finished."""
        return all(sample.finished for sample in self.group(n))

    def hand_out(self, finished: Sequence[int], on_group: OnGroup | None) -> bool:
        """Calls `on_group` with each finished group; returns True if any call returned True."""
        return on_group is not None and any([on_group(self.completions([n])) for n in finished])

    def completions(self, finished: Sequence[int]) -> Completions:
        """The completions of the finished groups at these indices."""
        for n in finished:
            if n not in self._completions:
                self._completions[n] = self._completions_of([n])
        if not finished:
            return self._completions_of([])
        return Completions.concatenate([self._completions[n] for n in finished])

    def _completions_of(self, groups: Sequence[int]) -> Completions:
        samples = [sample for n in groups for sample in self.group(n)]
        prompts = Prompts.concatenate([self._prompts[n] for n in groups])
        return completions_of(prompts, samples, self._num_samples, self._decode_text)

    def rollout(self) -> Rollout:
        """The finished groups as completions, and the unfinished groups unchanged."""
        done = [n for n in range(len(self)) if self.finished(n)]
        left = [n for n in range(len(self)) if not self.finished(n)]
        return Rollout(
            completions=self.completions(done),
            prompt_indices=tuple(done),
            versions=tuple(sample.version for n in done for sample in self.group(n)),
            unfinished=UnfinishedGroups(
                Prompts.concatenate([self._prompts[n] for n in left]),
                self._num_samples,
                tuple(sample.at(i) for i, n in enumerate(left) for sample in self.group(n)),
            ),
        )


def _check_size(unfinished: UnfinishedGroups, num_samples: int) -> None:
    if unfinished.num_samples != num_samples:
        raise UserError(
            f"{len(unfinished.prompts)} unfinished groups have {unfinished.num_samples} samples each and "
            f"would go on with num_samples {num_samples}; a run keeps one number: finish them first, or set "
            f"it to {unfinished.num_samples}"
        )
