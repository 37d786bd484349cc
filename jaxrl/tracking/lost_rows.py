"""Finds metric rows that were lost or changed after a checkpoint was saved."""

from __future__ import annotations

import pathlib

from jaxrl.tracking.checkpoints import StoredCheckpoints
from jaxrl.tracking.metrics import parse_row
from jaxrl.tracking.row_checksum import RowChecksum
from jaxrl.tracking.run_folder import StageFolder


def lost_rows(folder: StageFolder) -> str | None:
    """Compares metrics.jsonl with the checksum in the newest intact checkpoint. Only reads.

    Rows of later steps are not compared: a run that resumes from the checkpoint writes them again.

    Returns:
      One line with the file and its fault; None if the rows are unchanged.
    """
    stored = StoredCheckpoints(folder.checkpoints.path)
    for step in reversed(stored.manifests.steps()):
        # Read the manifest before the rows: a run at work only appends to the rows.
        written = stored.manifests.rows(step)
        fault = None if written is None else _fault(folder.metrics, written)
        if fault is None:
            return None
        # Reading a whole checkpoint is slow, so it is done only after a mismatch.
        if stored.manifests.fault(step) is None:
            return f"{folder.metrics} {fault}, with which the checkpoint of step {step} was saved"
    return None


def _fault(path: pathlib.Path, written: RowChecksum) -> str | None:
    content = path.read_bytes() if path.exists() else b""
    expected = f"of the {written.num_rows} rows to step {written.last_step}"
    if not written.matches(content):
        return _difference(path, content, written, expected)
    after = content[written.num_bytes :].splitlines()
    step = _step_of(after[0]) if after else None
    if step is not None and step <= written.last_step:
        return f"has a second row of step {step} after the last {expected}"
    return None


def _difference(path: pathlib.Path, content: bytes, written: RowChecksum, expected: str) -> str:
    if not content:
        return f"{'is empty' if path.exists() else 'is missing'} and has none {expected}"
    last = -1
    found = 0
    for number, line in enumerate(content.splitlines(), start=1):
        step = _step_of(line)
        if step is None:
            return f"has a line {number} that is no row, instead {expected}"
        if step <= last:
            return f"has a row of step {step} after that of step {last} in the place {expected}"
        last = step
        found += step <= written.last_step
    if found < written.num_rows:
        return f"has {found} {expected}"
    return f"has other content than that {expected}"


def _step_of(line: bytes) -> int | None:
    try:
        return parse_row(line)["step"]
    except (TypeError, ValueError):
        return None
