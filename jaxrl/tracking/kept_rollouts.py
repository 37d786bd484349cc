"""Writes the samples of some steps to files, in the background. People read them; training does not.

A file is written atomically. A resumed run deletes the files of steps after its checkpoint, like their metric
rows, and writes them again. If a file cannot be written, the run logs a warning and continues.
"""

from __future__ import annotations

import concurrent.futures
import logging
import operator
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.dataflows.experience import Experience
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.roles.packing import Packing
from jaxrl.tracking.durable import write_atomically
from jaxrl.tracking.run_folder import RolloutFolder, RunConfig, RunFolder
from jaxrl.tracking.sample_rows import TokenStrings, logprobs_by_response, sample_rows, to_lines
from jaxrl.types import Scored

logger = logging.getLogger(__name__)

# Prompts of a step whose samples are kept. A person reads no more, and each has all of its samples.
_MOST_PROMPTS = 8

_at = jax.jit(operator.getitem)


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
        self._has_old_logprob = has_old_logprob
        self._stop_ids = frozenset(stop_ids)
        self._token_strings = TokenStrings(tokenizer)
        self._folder = folder.rollouts
        self._files = RolloutFiles(self._folder, every=config.rollouts_every)
        self._begun = False

    def begin_step(self) -> None:
        """Deletes files of steps that this resumed run will repeat. Call before the first step."""
        if not self._begun and hosts.is_first():
            self._files.remove_after(self._timer.step)
        self._begun = True

    def look(self, experience: Experience) -> None:
        """Starts writing the step's samples if the step is selected. Collective."""
        if not self._files.is_due(self._timer.step + 1):
            return
        of_trainer = None
        if self._has_old_logprob:
            # Collective, so it comes before the question of who writes: a process that has a part of it.
            packing, count = experience.packing, _MOST_PROMPTS * experience.completions.num_samples
            found = _at(experience.batch.old_logprob, packing.rows(packing.starts[:count]))
            of_trainer = packing, hosts.fetch(found, everywhere=False)
        self._write(experience.scored, of_trainer)

    def look_at_failed(self, scored: Scored) -> pathlib.Path:
        """Writes the samples of a step that found too few groups; returns the path. Collective."""
        return self._write(scored, None)

    def _write(self, scored: Scored, of_trainer: tuple[Packing, np.ndarray] | None) -> pathlib.Path:
        """Writes the rows of the first prompts, in the background while training continues. Collective.

        Args:
          scored: the samples.
          of_trainer: arguments of `logprobs_by_response` for the trainer's log-probabilities.
        """
        step = self._timer.step + 1
        kept = scored.take(range(len(scored.completions.prompts))[:_MOST_PROMPTS])
        kept = kept.replace(completions=kept.completions.with_rows(hosts.is_first()))

        # Called on the writing thread, which also decodes the texts; training does not wait for them.
        def rows() -> Iterator[dict[str, Any]]:
            lengths = kept.completions.lengths_B.tolist()
            return sample_rows(
                kept,
                self._token_strings,
                stop_ids=self._stop_ids,
                terms=self._terms,
                step=step,
                old_logprob=of_trainer and logprobs_by_response(*of_trainer, lengths),
            )

        if hosts.is_first():
            self._files.write(step, rows)
        return self._folder.step(step)

    def close(self) -> None:
        self._files.close()


class RolloutFiles:
    """Writes the sample files of a run, one at a time, in a background thread."""

    def __init__(self, folder: RolloutFolder, *, every: int):
        """Creates no file or folder.

        Args:
          folder: folder of the files.
          every: number of steps between files; 0 writes none.
        """
        self._folder = folder
        self._every = every
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: concurrent.futures.Future[None] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the samples of this step are written: those of step 1 and of every `every`-th step."""
        return self._every > 0 and (step == 1 or step % self._every == 0)

    def remove_after(self, step: int) -> None:
        for later, path in self._folder.steps().items():
            if later > step:
                path.unlink(missing_ok=True)

    def write(self, step: int, make: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Starts writing the file of a step, after waiting for the previous file.

        Args:
          step: number of the step.
          make: returns the rows; it is called in the background thread.
        """
        self._wait()
        # A run that keeps no samples starts no thread.
        if self._writer is None:
            self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollouts")

        def write() -> None:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder.step(step), to_lines(make()))

        self._writing = self._writer.submit(write)

    def _wait(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except (OSError, UserError) as error:
            logger.warning(
                "samples could not be written to %s (%s); training goes on without them",
                self._folder.path,
                getattr(error, "strerror", None) or error,
            )

    def close(self) -> None:
        self._wait()
        if self._writer is not None:
            self._writer.shutdown()
