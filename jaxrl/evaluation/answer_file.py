"""Stores the answers of an evaluation as they are finished, so that an interrupted evaluation can continue.

    settings.json    settings of the evaluation and identity of the model
    samples.jsonl    a row per answer (`tracking.sample_rows`), the answers to a problem in consecutive rows
    results.json     statistics of each set
    samples.html     page with some answers

A problem is answered if all of its n answers are in the file. Rows of other problems are dropped.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import IO, Any

from jaxrl.errors import UserError
from jaxrl.files import read_json_object
from jaxrl.tracking.durable import ensure_writable, write_atomically
from jaxrl.tracking.run_folder import EvaluationFolder
from jaxrl.tracking.sample_rows import read_head, to_line
from jaxrl.types import Prompts, Scored

# Key of a problem: name of its set, and its row number in the set.
Problem = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class AnswerRow:
    """The fields of an answer that statistics use.

    Attributes:
      correct: whether the answer is right.
      prediction: extracted answer; None if there is none.
      length: number of response tokens.
      truncated: whether the response reached its limit.
      entropy: mean entropy per token, in nats.
      failed: whether grading failed.
    """

    correct: bool
    prediction: str | None
    length: int
    truncated: bool
    entropy: float
    failed: bool


class AnswerFile:
    """The answers of an evaluation, on disk and in memory.

    Attributes:
      folder: folder of the evaluation.
      answers: answered problems: problem -> its n answers.
    """

    def __init__(self, folder: EvaluationFolder, settings: Mapping[str, Any], n: int):
        """Reads the answers in the folder. Writes nothing.

        Args:
          folder: folder of the evaluation; it may be missing.
          settings: JSON-able settings that the answers depend on.
          n: number of answers per problem.

        Raises:
          UserError: if the folder has answers for other settings or cannot be read.
        """
        self.folder = folder
        self._settings = dict(settings)
        self._n = n
        self._check_same()
        self.answers: dict[Problem, list[AnswerRow]] = {}
        self._kept: list[tuple[int, int]] = []
        self._read()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> AnswerFile:
        """Creates the folder, drops rows of incomplete problems and opens the file for writing.

        Raises:
          UserError: if the folder is not writable.
        """
        ensure_writable(self.folder.path)
        settings = json.dumps(self._settings, indent=1)
        write_atomically(self.folder.settings, settings.encode())
        path = self.folder.samples
        if path.exists() and sum(size for _, size in self._kept) != path.stat().st_size:
            _keep(path, self._kept)
        self._file = path.open("ab")
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def missing(self, prompts: Prompts) -> list[int]:
        """The indices of the unanswered prompts."""
        problems = zip(prompts.sources, prompts.ids_N.tolist(), strict=True)
        return [i for i, problem in enumerate(problems) if problem not in self.answers]

    def add(self, scored: Scored, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the answers to one problem.

        Args:
          scored: the n answers.
          rows: their rows, as `tracking.sample_rows` makes them.

        Raises:
          UserError: if the answers cannot be written.
        """
        assert self._file is not None, "use it as a context manager"
        prompts = scored.completions.prompts
        rows = list(rows)
        try:
            self._file.write(b"".join(map(to_line, rows)))
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self.folder.samples} cannot be written ({error.strerror or error}); free space and start "
                "the same command again, which goes on from the problems it has"
            ) from error
        self.answers[prompts.sources[0], int(prompts.ids_N[0])] = [_answer(row) for row in rows]

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes results.json."""
        content = json.dumps({"settings": self._settings, **results}, indent=1)
        write_atomically(self.folder.results, content.encode())

    def _check_same(self) -> None:
        path = self.folder.settings
        if not path.exists():
            if self.folder.samples.exists():
                raise UserError(
                    f"{self.folder.samples} is there without {path.name}, so that nobody knows what was "
                    "asked; name another --out, or move it away"
                )
            return
        before = read_json_object(path, absent="name another --out")
        now = json.loads(json.dumps(self._settings))
        changed = [
            f"{name}: {before.get(name)} -> {now.get(name)}"
            for name in (before | now)
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise UserError(
                f"{self.folder} holds answers that were asked for otherwise ({'; '.join(changed)}); name "
                "another --out, or ask as before"
            )

    def _read(self) -> None:
        """Finds the answered problems and the positions of their rows."""
        if not self.folder.samples.exists():
            return
        found: dict[Problem, list[tuple[int, int, int, AnswerRow]]] = collections.defaultdict(list)
        at = 0
        with self.folder.samples.open("rb") as file:
            for line in file:
                try:
                    row = read_head(line)
                    problem, sample = (row["source"], row["prompt_id"]), row["sample"]
                    found[problem].append((sample, at, len(line), _answer(row)))
                except (KeyError, TypeError, ValueError):
                    pass  # an incomplete or foreign row: its problem is sampled again
                at += len(line)
        for problem, rows in found.items():
            # After a kill between two lines a problem may be there twice, the first time incomplete.
            latest = {sample: (at, size, answer) for sample, at, size, answer in rows}
            if sorted(latest) == list(range(self._n)):
                self.answers[problem] = [latest[sample][2] for sample in range(self._n)]
                self._kept += [latest[sample][:2] for sample in range(self._n)]
        self._kept.sort()


def _keep(path: pathlib.Path, places: Iterable[tuple[int, int]]) -> None:
    """Keeps only some lines of a file.

    Args:
      path: the file.
      places: (start, number of bytes) of each line to keep.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with path.open("rb") as before, temporary.open("wb") as after:
        for start, size in places:
            before.seek(start)
            after.write(before.read(size))
    temporary.replace(path)


def _answer(row: Mapping[str, Any]) -> AnswerRow:
    return AnswerRow(
        bool(row["correct"]),
        row["prediction"],
        int(row["length"]),
        bool(row["truncated"]),
        float(row["entropy"] or 0),
        row.get("failure") is not None,
    )
