"""Writes the samples of some steps to files, for people to read."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.dataflows.experience import Experience
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.tracking.rollout_files import RolloutFiles
from jaxrl.tracking.run_config import RunConfig
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.sample_rows import TokenStrings, logprobs_by_response, sample_rows
from jaxrl.types import PackedBatch, Scored


class KeptRollouts:
    """Keeps the samples of the steps that the config selects; the first process writes them."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        tokenizer: Tokenizer,
        timer: StepTimer,
        *,
        stop_ids: Iterable[int],
        terms: Iterable[str],
        has_old_logprob: bool,
    ):
        """Deletes and writes nothing yet.

        Args:
          config: settings of what is kept.
          folder: folder of the run.
          tokenizer: tokenizer of the policy.
          timer: loop of the steps.
          stop_ids: token ids that end a response.
          terms: names of the terms of the reward.
          has_old_logprob: whether a step has log-probabilities of the trainer, besides those of the sampler.
        """
        self._timer = timer
        self._terms = tuple(terms)
        self._most_prompts = config.rollouts_prompts or None
        self._has_old_logprob = has_old_logprob
        self._stop_ids = frozenset(stop_ids)
        self._token_strings = TokenStrings(tokenizer)
        self._files = RolloutFiles(folder.rollouts, every=config.rollouts_every)
        self._begun = False

    def begin_step(self) -> None:
        """Deletes files of steps that this resumed run will repeat. Call before the first step."""
        if not self._begun and hosts.is_first():
            self._files.remove_after(self._timer.step)
        self._begun = True

    def look(self, experience: Experience) -> None:
        """Starts writing the step's samples if the step is selected. Collective."""
        step = self._timer.step + 1
        if not self._files.is_due(step):
            return
        old_logprob = None
        if self._has_old_logprob:
            old_logprob = np.asarray(hosts.fetch(experience.batch.old_logprob))
        packed = PackedBatch(**hosts.fetch(experience.batch.packing()))
        if hosts.is_first():
            rows = functools.partial(self._rows, step, experience.scored, packed, old_logprob)
            self._files.write(step, rows)

    def look_at_failed(self, scored: Scored) -> pathlib.Path:
        """Writes the samples of a step that found too few groups; returns the path."""
        step = self._timer.step + 1
        if hosts.is_first():
            kept = scored.take(range(len(scored.completions.prompts))[: self._most_prompts])
            settings: Any = {"stop_ids": self._stop_ids, "terms": self._terms, "step": step}
            self._files.write(step, lambda: sample_rows(kept, self._token_strings, **settings))
        return self._files.path(step)

    def _rows(
        self, step: int, scored: Scored, packed: PackedBatch, old_logprob: np.ndarray | None
    ) -> Iterator[dict[str, Any]]:
        """Rows of the first prompts. Runs in the background while training continues."""
        kept = scored.take(range(len(scored.completions.prompts))[: self._most_prompts])
        of_response = None
        if old_logprob is not None:
            lengths = kept.completions.lengths_B.tolist()
            of_response = logprobs_by_response(packed, old_logprob, lengths)
        return sample_rows(
            kept,
            self._token_strings,
            stop_ids=self._stop_ids,
            terms=self._terms,
            step=step,
            old_logprob=of_response,
        )

    def close(self) -> None:
        """Waits until everything is written."""
        self._files.close()
