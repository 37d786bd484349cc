"""Writes the metrics of a run to metrics.jsonl, the source of truth, and to the loggers of the run.

Metrics have verl's names (`actor/entropy`, `response_length/mean`, `timing_s/gen`). This module depends on
two kinds of names only: accuracies of evaluations, which contain the data set, and timings.
Not covered: reducing metrics over hosts. The caller passes plain floats on one host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.errors import UserError
from jaxrl.files import read_bytes
from jaxrl.tracking.durable import AppendedFile, ensure_writable, write_atomically
from jaxrl.tracking.loggers import LOGGER_KINDS, LoggedRun, Logger
from jaxrl.tracking.run_folder import StageFolder, split_logger

_EVALUATION_ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/(?P<statistic>mean@\d+)")
# Prefixes of metrics that are measured: times, rates and memory.
_TIMING_PREFIXES = (
    "agent/seconds",
    # When an agent asks decides what is still in the pages.
    "agent/prompt_share_from_pages",
    "time_s",
    "timing_s/",
    "timing_per_token_ms/",
    "perf/time_per_step",
    "perf/throughput",
    "perf/tflops",
    "perf/mfu",
    "perf/peak_memory_gb",
)


class RowChecksum(NamedTuple):
    """The checksum of the rows at the start of a metrics file, which a checkpoint stores.

    Attributes:
      num_bytes: number of bytes of the rows.
      crc32: CRC-32 of these bytes.
      num_rows: number of rows.
      last_step: step of the last row; -1 without rows.
    """

    num_bytes: int = 0
    crc32: int = 0
    num_rows: int = 0
    last_step: int = -1

    def extended_by(self, line: bytes, step: int) -> RowChecksum:
        """The checksum after appending one row.

        Args:
          line: bytes of the row, with its newline.
          step: step of the row.
        """
        return RowChecksum(
            self.num_bytes + len(line), zlib.crc32(line, self.crc32), self.num_rows + 1, step
        )

    def matches(self, content: bytes) -> bool:
        """Whether the content of a file begins with these rows."""
        start = content[: self.num_bytes]
        return len(start) == self.num_bytes and zlib.crc32(start) == self.crc32


def read_metrics(
    path: str | os.PathLike[str], *, skips_damaged: bool = False
) -> list[dict[str, Any]]:
    """Reads the rows of a metrics file, in order of step.

    It is safe to read the file of a running job: an incomplete last line is skipped with a warning. Duplicate
    rows are skipped.

    Args:
      path: the file.
      skips_damaged: whether invalid lines and a missing file are skipped instead of refused.

    Returns:
      One dict per step: "step" (int), "time_s" (Unix seconds at which the row was written) and the
      metrics as floats, which may be NaN or infinite.

    Raises:
      UserError: if the file does not exist, or a line other than the last is not a row.
    """
    return [row for _, row in _read_lines(Path(path), skips_damaged=skips_damaged)]


def without_timings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Removes times, rates and memory from a row of `read_metrics`. Equal runs give equal results."""
    return {name: value for name, value in row.items() if not name.startswith(_TIMING_PREFIXES)}


def evaluation_accuracy(metrics: Mapping[str, float]) -> dict[str, float]:
    """The accuracies among `metrics`; `val-core/<source>/acc/mean@N` is renamed to `<source> mean@N`."""
    matches = {key: _EVALUATION_ACCURACY.fullmatch(key) for key in metrics}
    return {f"{m['source']} {m['statistic']}": metrics[key] for key, m in matches.items() if m}


def evaluation_stderr(metrics: Mapping[str, float]) -> dict[str, float]:
    """The standard errors of the accuracies among `metrics`, under the names of `evaluation_accuracy`.

    An evaluation of a single problem has none.
    """
    matches = [m for key in metrics if (m := _EVALUATION_ACCURACY.fullmatch(key))]
    keys = {
        f"{m['source']} {m['statistic']}": f"val-aux/{m['source']}/acc/{m['statistic']}/stderr"
        for m in matches
    }
    return {name: metrics[key] for name, key in keys.items() if key in metrics}


class MetricsWriter(contextlib.AbstractContextManager):
    """Writes the metrics of each step to metrics.jsonl and to loggers.

    A run that was killed and resumed has the same metrics.jsonl as an uninterrupted run, apart from times:
    rows after the restored checkpoint are dropped before the run repeats their steps.

    Attributes:
      checksum: checksum of the rows so far.

    Args:
      directory: folder of the stage, as in `StageFolder`.
      resume_step: step of the restored checkpoint; later rows are dropped. None for a new stage, which
        drops all rows.
      drops_damaged: whether invalid lines are dropped instead of refused.
      loggers: entries of `run.loggers`.
      run: what the loggers show of the run besides its metrics.

    Raises:
      UserError: if the folder is not writable, the existing metrics file is damaged, or a logger does not
        start.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        drops_damaged: bool = False,
        loggers: Sequence[str] = (),
        run: LoggedRun = LoggedRun(),  # noqa: B008, frozen
    ):
        folder = StageFolder(Path(directory))
        ensure_writable(directory)
        kept = []
        if resume_step is not None and folder.metrics.exists():
            lines = _read_lines(folder.metrics, skips_damaged=drops_damaged)
            kept = [
                (line + b"\n", row["step"]) for line, row in lines if row["step"] <= resume_step
            ]
        self.checksum = RowChecksum()
        for line, step in kept:
            self.checksum = self.checksum.extended_by(line, step)
        # Keep the bytes of the lines: parsing and printing them again could change them.
        write_atomically(folder.metrics, b"".join(line for line, _ in kept))
        self._file = AppendedFile(folder.metrics)
        self._loggers: list[Logger] = []
        with contextlib.ExitStack() as on_failure:
            # A logger that does not start must not leave the others open.
            on_failure.callback(self.close)
            for entry in loggers:
                # A project of the entry itself wins over that of the recipe.
                name, project = split_logger(entry)
                of_entry = dataclasses.replace(run, project=project or run.project)
                self._loggers.append(LOGGER_KINDS[name](folder, resume_step, of_entry))
            on_failure.pop_all()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step to disk. Steps must increase from call to call."""
        values = {key: float(value) for key, value in metrics.items()}
        last = self.checksum.last_step
        assert step > last, f"step {step} after step {last}: one row per step, in increasing order"
        row = {"step": step, "time_s": round(time.time(), 3)}
        # JSON has no NaN or infinity. Every parser accepts them as strings, and float() converts them back.
        row |= {key: x if math.isfinite(x) else str(x) for key, x in values.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        # metrics.jsonl comes first: what a logger has, the source of truth has too.
        self._file.append(line)
        self.checksum = self.checksum.extended_by(line, step)
        for logger in self._loggers:
            logger.write(step, values)

    def close(self) -> None:
        for opened in (self._file, *self._loggers):
            opened.close()

    def __exit__(self, *_) -> None:
        self.close()


def _read_lines(path: Path, *, skips_damaged: bool) -> list[tuple[bytes, dict[str, Any]]]:
    # (line without its newline, row) of every line, without an incomplete last line.
    if skips_damaged and not path.exists():
        return []
    lines = read_bytes(path, absent="name the metrics file of a run").splitlines()
    rows: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError('expected an object with an integer "step"')
            row = {key: value if key == "step" else float(value) for key, value in row.items()}
        except (TypeError, ValueError) as error:
            if skips_damaged:
                continue
            if number == len(lines):
                warnings.warn(
                    f"{path}:{number}: dropped the last line, which was cut short", stacklevel=3
                )
                break
            raise UserError(
                f"{path}:{number}: not a row of metrics ({error}); "
                "remove that line, or start the run in another folder"
            ) from error
        # A row may stand twice in a file that was copied or edited.
        if not rows or row["step"] > rows[-1][1]["step"]:
            rows.append((line, row))
    return rows


class Timers:
    """Accumulates seconds by phase.

        with timers("gen"):
            completions = actor.generate(prompts)
        metrics |= timers.take()  # {"timing_s/gen": ...}

    JAX returns before the device has finished. The time of a computation counts for the phase that first
    reads its result.
    """

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time spent in the block to `name`, also when the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Returns the accumulated seconds as {"timing_s/<name>": seconds} and resets them."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
