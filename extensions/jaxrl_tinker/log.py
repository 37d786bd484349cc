"""The log of a server: what clients have submitted and what came of it, so that a restart goes on from there.

    session     a session was created                                   before it is answered
    sampler     a sampling session was created: body                    before it is answered
    call        a submission: route, id, channel, body as it came       before it is answered
    result      what a submission came to: id, ran, body, ..            before it can be fetched
    replaced    the model of that id has lost its place                 before another one has it
    checkpoint  the state after the call of that id is in a checkpoint  once it is on disk
    end         the session is over

A line is a JSON object, with bytes in base64, and names its kind and its session. A killed server leaves all
lines that `write` has written. Because of power cuts `sync` waits for the disk before an answer, for all that
come at the same time together. A line that is cut short is dropped, and so are those of sessions that ended.
"""

from __future__ import annotations

import base64
import json
import logging
import pathlib
import threading
from typing import Any

from jaxrl.errors import UserError
from jaxrl.files import read_bytes
from jaxrl.tracking.durable import AppendedFile, write_atomically

_LOG = logging.getLogger(__name__)

Record = dict[str, Any]


class Log:
    """A log that is open for writing. Any thread may write.

    Attributes:
      records: its records in order, with `body` in bytes. Their reader may empty the list.
      written: number of records written until now.
    """

    def __init__(self, path: pathlib.Path):
        """Reads a log, or begins one.

        Raises:
          UserError: it is damaged.
        """
        records: list[Record] = []
        # What follows the last line break is a line that was cut short.
        lines = read_bytes(path, absent="").split(b"\n")[:-1] if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if "body" in record:
                    record["body"] = base64.b64decode(record["body"], validate=True)
                records.append(record)
            except ValueError as error:
                raise UserError(
                    f"line {number} of {path} is damaged ({error}); restore the file from a backup, or "
                    "move it away to begin anew"
                ) from error
        begun, ended = (
            {record["session"] for record in records if record["kind"] == kind}
            for kind in ("session", "end")
        )
        # Sessions that are not over. A record that was written after the end of its session is dropped too.
        self._sessions = begun - ended
        self.records = [record for record in records if record["session"] in self._sessions]
        write_atomically(path, b"".join(map(_line, self.records)))
        self._file = AppendedFile(path)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._failed: OSError | None = None
        self.written = self._synced = 0

    def write(self, kind: str, session_id: str, **fields: Any) -> None:
        """Appends a record.

        Raises:
          OSError: the disk does not accept it, or has not accepted one before: a log has no gaps.
        """
        line = _line({"kind": kind, "session": session_id, **fields})
        with self._lock:
            if self._failed is not None:
                raise self._failed
            try:
                self._file.append(line, durable=False)
                self.written += 1
                if kind == "session":
                    self._sessions.add(session_id)
                elif kind == "end":
                    self._sessions.discard(session_id)
                    if not self._sessions:
                        # No client can come back for anything in it.
                        self._file.clear()
            except OSError as error:
                _LOG.error("nothing more is submitted: the log cannot be written (%s)", error)
                self._failed = error
                raise

    def sync(self, count: int) -> None:
        """Waits until the first `count` records are on disk."""
        with self._sync_lock:
            # Whoever has waited for the lock may find that the sync before has covered its records.
            if self._synced < count:
                # Records that are written during the sync may not be on disk after it.
                written = self.written
                try:
                    self._file.sync()
                except OSError as error:
                    self._failed = error
                    raise
                self._synced = written

    def close(self) -> None:
        with self._lock:
            self._file.close()
            # Whoever writes later must hear of it: its answer would promise what no restart knows.
            self._failed = OSError("the log is closed")


def _line(record: Record) -> bytes:
    if "body" in record:
        record = {**record, "body": base64.b64encode(record["body"]).decode()}
    return json.dumps(record).encode() + b"\n"
