"""The samples of a call to a backend, in groups: one group per prompt.

Example, G = 2, one unfinished group of an earlier call and the prompts "p", "q":

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
      prompts: N prompts, one per group.
      samples: N * G samples, group by group.
      num_resumed: number of groups from an earlier call.
    """

    def __init__(
        self,
        prompts: Prompts,
        options: SamplingOptions,
        decode_text: DecodeText,
        unfinished: UnfinishedGroups | None = None,
    ):
        """Args: those of `RolloutBackend.resume`; `unfinished` is copied.

        Raises:
          UserError: the unfinished groups have another number of samples.
        """
        G = options.num_samples
        resumed: list[Sample] = []
        if unfinished is not None:
            _check_size(unfinished, G)
            prompts = Prompts.concatenate([unfinished.prompts, prompts])
            resumed = [sample.at(sample.prompt) for sample in unfinished.samples]
        self.num_resumed = len(resumed) // G
        new = range(self.num_resumed, len(prompts))
        self.prompts = prompts
        self.samples = resumed + [Sample(n, k, options.step) for n in new for k in range(G)]
        self._num_samples = G
        self._decode_text = decode_text
        # Decoding long responses to text is slow. The cache serves both `hand_out` and the result.
        self._completions: dict[int, Completions] = {}

    def __len__(self) -> int:
        return len(self.prompts)

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
        prompts = self.prompts.take(groups)
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
                self.prompts.take(left),
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
