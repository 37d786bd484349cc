"""The process that brings the files of a run to a bucket, behind the run, which never waits for it.

    run       FOLDER, on this host's disk     checkpoints, manifests, metrics, rollouts, report
    mirror      | every 5 s, what is new      this process, started by `run_output`
    bucket    URL, the same tree              checkpoints/20/*, then checkpoints.manifests/20.json
                                              metrics.jsonl.parts/<offset>, lock/<number>

* An object is there whole or not at all. The manifest of a checkpoint is put last, where none is, after a
  listing has shown all of its objects with their sizes. So a checkpoint with a manifest was whole.
* Files that only grow are objects of some rows each. The last is put again, longer, until it is large.
* The files of a checkpoint are linked aside first: the run may remove them before they are sent.
* Removed are rows that the run has taken back, and checkpoints that this host does not have: those before the
  newest `keep`, and those after the one that was sent.

Hosts without a shared disk have a mirror each, and a part of each checkpoint. That of process 0 asks the
others for their parts of a step by the manifest of its own part, `parts/<lock>.0/rl/20.json`. They send the
files that it does not name, then their manifests, or null if they do not have the step any more. The whole
manifest is the union. Each of these hosts starts from the bucket alone.

Arguments: URL, FOLDER, checkpoints to keep, words for the owner; for such hosts also their number, which of
them it is, and the number of the lock, 0 for the first. The run has ended once its process has, or standard
input: what is left is sent for as long as the bucket takes something.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import pathlib
import re
import select
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec

from jaxrl.errors import UserError
from jaxrl_buckets.bucket_lock import BEAT_S, STALE_S, BucketLock, LockLost
from jaxrl_buckets.buckets import AT_ONCE, PARTS, Listing, join_parts, reason_of, told
from jaxrl_buckets.stored_runs import (
    PART,
    PARTS_OF_HOSTS,
    StepName,
    asked_of,
    checkpoints_of,
    fetch_run,
    manifests_of,
    sizes_of,
)

NOTE = ".bucket.json"
"""File in a run's folder: the number of the lock under which it was the newest, and what was sent."""

_EVERY_S, _ASK_S = 5.0, 1.0
# The end of a run waits no longer for a bucket that takes nothing.
_PATIENCE_S = 120.0
_PART_BYTES = 2**18
_GROWING = ("metrics.jsonl", "schedule.jsonl")
_FETCHED, _SENDING = ".fetched", ".sending"
_NOT_SENT = re.compile(r"(.*/)?(\.[^/]*|checkpoints(\.manifests|\.damaged)?)(/.*)?|(.*[/.])?lock")


class _Progress(fsspec.callbacks.Callback):
    """When the bucket has last taken something."""

    def __init__(self):
        super().__init__()
        self.at_s = time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self.at_s = time.monotonic()


class Mirror:
    """The files of a run, and what of them is in the bucket.

    Attributes:
      lock: the lock of the run in the bucket.
      ended: set once the run has ended.
      fault: why the bucket takes nothing; "" while it does.
      taken_by: the run that has taken the lock; "" while this one holds it.
      progress: when it has last taken something.

    Args:
      parts: number of hosts, each of which has a part of every checkpoint on a disk of its own.
    """

    def __init__(
        self, url: str, folder: pathlib.Path, keep: int, lock: BucketLock, *, parts: int = 1
    ):
        self._num_parts = parts
        self._url, self._folder, self._keep, self.lock = url, folder, keep, lock
        self._system, self._root = fsspec.core.url_to_fs(url)
        self.ended, self.progress = threading.Event(), _Progress()
        self.fault = self.taken_by = ""
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
        # Size and time of what is in the bucket, and of what was there at the last look.
        self._sent: dict[str, list[int]] = {}
        self._seen: dict[str, list[int]] = {}
        # Size and CRC-32 of each part of a file that grows.
        self._parts: dict[str, list[tuple[int, int]]] = {}

    def open(self) -> None:
        """Fetches the run unless its newest files are in this folder. The lock is held."""
        listing = Listing(self._url, may_be_empty=True)
        for name in [x for x in listing.files if x.startswith(PARTS_OF_HOSTS)]:
            self._remove(name)
            del listing.files[name]
        self._take_from_bucket(listing)
        for name in sorted(name for name in listing.files if PARTS.search(name)):
            content = self._system.cat_file(f"{self._root}/{name}")
            parts = self._parts.setdefault(PARTS.sub("", name), [])
            parts.append((len(content), zlib.crc32(content)))
        self._write_note()
        self.lock.remove_older()

    def _take_from_bucket(self, listing: Listing) -> None:
        for name in (_FETCHED, _SENDING):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        note = {"number": -1, "sent": {}}
        with contextlib.suppress(OSError, ValueError):
            note = json.loads((self._folder / NOTE).read_text())
        # Nobody has held the lock since this host has, or the bucket holds nothing to go on from.
        is_empty = all(name.startswith("lock/") for name in listing.files)
        is_behind = note["number"] < self.lock.before and not is_empty
        # Parts, of which this host has one, are completed in the bucket alone.
        if max(self._num_parts, note.get("parts", 1)) > 1:
            self._fetch(listing, keeps_old=is_behind)
        elif not is_behind:
            sizes = {name: int(about["size"]) for name, about in listing.files.items()}
            self._sent = {k: v for k, v in note["sent"].items() if sizes.get(k) == v[0]}
        else:
            self._fetch(listing)

    def send(self, *, everything: bool) -> None:
        """Brings what is new to the bucket.

        Args:
          everything: also files that were changed since the last look.
        """
        new = [x for x in manifests_of(self._names()) if not self._is_sent(x.manifest)]
        staged = [name for name in reversed(new) if self._link(name)]
        # Rows go before the manifests that were written after them.
        self._send_files(everything=everything or bool(staged))
        for name in staged:
            self._send_checkpoint(name)
            shutil.rmtree(self._folder / _SENDING / name.folder)
        if staged:
            shutil.rmtree(self._folder / _SENDING, ignore_errors=True)
        self._write_note()

    def left(self) -> list[str]:
        """The files that the bucket does not have."""
        steps = [x for x in manifests_of(self._names()) if not self._is_sent(x.manifest)]
        late = [x for x in self._names() if not (_NOT_SENT.fullmatch(x) or self._is_sent(x))]
        return [name.folder for name in reversed(steps)] + late

    def run(self) -> None:
        """Sends until the run has ended and all is sent, or the lock is lost."""
        while True:
            has_ended = self.ended.is_set()
            try:
                self.send(everything=has_ended)
                if self.fault:
                    _say(f"{self._url} takes files again")
                self.fault = ""
                if has_ended:
                    return
            except LockLost as error:
                self.taken_by = self.fault = str(error)
                return
            except Exception as error:  # each client has its own
                if not self.fault:
                    _say(
                        f"{self._url} takes no files ({reason_of(error)}); it is tried again until the end "
                        f"of the run, and all is in {self._folder}"
                    )
                self.fault = reason_of(error)
            if has_ended:
                time.sleep(1)
            else:
                self.ended.wait(_EVERY_S)

    def _fetch(self, listing: Listing, *, keeps_old: bool = True) -> None:
        fetched = self._folder / _FETCHED
        fetched.mkdir()
        for fault in fetch_run(listing, fetched):
            _say(f"{self._url}/{fault}")
        join_parts(fetched)
        own = (_FETCHED, "inputs", "lock")
        old = [x for x in self._folder.iterdir() if x.name not in own and x.suffix != ".lock"]
        there = {PARTS.sub("", x) for x in listing.files} | {"lock"}
        names = [x for x in self._names() if not x.endswith(".lock")]
        if not keeps_old and there.issuperset(names):
            for path in old:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif old:
            aside = self._folder.with_name(f"{self._folder.name}.aside.{time.time_ns()}")
            aside.mkdir()
            for path in old:
                path.rename(aside / path.name)
            _say(
                f"{self._url} has gone on elsewhere, or lacks files of this host; what {self._folder} had is "
                f"in {aside}"
            )
        for path in [x for x in fetched.rglob("*") if x.is_file()]:
            name = path.relative_to(fetched).as_posix()
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            path.replace(self._folder / name)
            self._sent[name] = _state(self._folder / name)
        shutil.rmtree(fetched, ignore_errors=True)

    def _names(self) -> list[str]:
        # Unlike `rglob`, it goes on when a folder is removed meanwhile.
        walked = ((pathlib.Path(top), files) for top, _, files in os.walk(self._folder))
        found = ((top / x).relative_to(self._folder).as_posix() for top, xs in walked for x in xs)
        return sorted(name for name in found if not name.startswith("."))

    def _is_sent(self, name: str) -> bool:
        try:
            return self._sent.get(name) == _state(self._folder / name)
        except FileNotFoundError:  # removed meanwhile
            return True

    def _check_lock(self) -> None:
        if self.taken_by:
            raise LockLost(self.taken_by)

    def _send_files(self, *, everything: bool) -> None:
        names = [x for x in self._names() if not _NOT_SENT.fullmatch(x)]
        growing = [x for x in names if x.endswith(_GROWING)]
        for name in growing:
            self._send_rows(name)
        seen = {}
        for name in set(names) - set(growing):
            with contextlib.suppress(FileNotFoundError):
                seen[name] = _state(self._folder / name)
        ready = [
            name
            for name, state in seen.items()
            if state != self._sent.get(name) and (everything or state == self._seen.get(name))
        ]
        self._seen = seen
        self._put_all({name: self._folder / name for name in ready})

    def _put_all(self, paths: dict[str, pathlib.Path]) -> None:
        futures = [self._pool.submit(self._put, path, name) for name, path in paths.items()]
        concurrent.futures.wait(futures)
        for future in futures:
            future.result()

    def _put(self, path: pathlib.Path, name: str) -> None:
        self._check_lock()
        try:
            state = _state(path)
            self._system.put_file(str(path), f"{self._root}/{name}", callback=self.progress)
        except FileNotFoundError:
            # The run may have removed it.
            if path.exists():
                raise
            return
        self._sent[name] = state
        self.progress.relative_update()

    def _send_rows(self, name: str) -> None:
        self._check_lock()
        try:
            state = _state(self._folder / name)
            if state == self._sent.get(name):
                return
            content = (self._folder / name).read_bytes()
        except FileNotFoundError:  # a stage that starts over is moved aside
            return
        # A row may be half written.
        content = content[: content.rfind(b"\n") + 1]
        before = self._parts.get(name, [])
        start, same = 0, 0
        for size, crc in before:
            if start + size > len(content) or zlib.crc32(content[start : start + size]) != crc:
                break
            start, same = start + size, same + 1
        if start < len(content) and same and before[same - 1][0] < _PART_BYTES:
            same -= 1
            start -= before[same][0]
        rest = content[start:]
        # What the run has taken back goes first, from the end: at any time there are rows without a gap.
        offset = sum(size for size, _ in before)
        for size, _ in reversed(before[same:]):
            offset -= size
            if offset != start or not rest:
                self._remove(f"{name}.parts/{offset:016d}")
        self._parts[name] = list(before[:same])
        if rest:
            self._system.pipe_file(f"{self._root}/{name}.parts/{start:016d}", rest)
            self._parts[name].append((len(rest), zlib.crc32(rest)))
        self._sent[name] = state
        self.progress.relative_update()

    def _link(self, name: StepName) -> bool:
        """Links the files of a checkpoint aside; returns whether they were all there."""
        staged = self._folder / _SENDING / name.folder
        shutil.rmtree(staged, ignore_errors=True)
        try:
            for path in sizes_of((self._folder / name.manifest).read_bytes()):
                (staged / path).parent.mkdir(parents=True, exist_ok=True)
                os.link(self._folder / name.folder / path, staged / path)
            os.link(self._folder / name.manifest, staged / NOTE)
        except FileNotFoundError:
            return False
        return True

    def _send_checkpoint(self, name: StepName) -> None:
        staged = self._folder / _SENDING / name.folder
        manifest = (staged / NOTE).read_bytes()
        target, sizes = f"{self._root}/{name.manifest}", sizes_of(manifest)
        # Of a mirror that was killed before it took a note, or of a checkpoint that was damaged.
        there = None
        with contextlib.suppress(FileNotFoundError):
            there = self._system.cat_file(target)
        own = {x: about for x, about in json.loads(manifest).items() if x != PART}
        is_there = there is not None and own.items() <= json.loads(there).items()
        if there is not None and not is_there:
            self._remove(name.manifest)
        if not is_there:
            if self._num_parts > 1:
                self._system.pipe_file(f"{self._root}/{name.part(self.lock.number, 0)}", manifest)
            paths = {name.folder + path: staged / path for path in sizes}
            self._put_all({k: x for k, x in paths.items() if self._sent.get(k) != _state(x)})
            whole = self._with_parts(name, own)
            manifest = json.dumps(whole).encode() if self._num_parts > 1 else manifest
            sizes = sizes_of(manifest)
            found = Listing(f"{self._url}/{name.folder}", may_be_empty=True).files
            for path in found.keys() - sizes.keys():
                self._remove(name.folder + path)
            for path, size in sizes.items():
                if int(found.get(path, {"size": -1})["size"]) != size:
                    self._sent.pop(name.folder + path, None)
                    raise UserError(f"{name.folder}{path} is not whole in the bucket")
            self.lock.beat()
            if whole:
                self._system.pipe_file(target, manifest, mode="create")
            else:
                _say(
                    f"{self._url}/{name.folder} is left out: another host does not have it any more"
                )
        for part in range(self._num_parts) if self._num_parts > 1 else ():
            self._remove(name.part(self.lock.number, part))
        self._sent[name.manifest] = _state(staged / NOTE)
        self._remove_others(name)

    def _with_parts(self, name: StepName, own: dict[str, Any]) -> dict[str, Any]:
        """The manifest of a checkpoint with the parts of other hosts; waits for them. {} if one is gone."""
        whole, num_found, since_s = own, -1, time.monotonic()
        for part in range(1, self._num_parts):
            files = b""
            while not files:
                self._check_lock()
                # Whether something comes: at the end nothing else shows that the others are at work.
                num = len(Listing(f"{self._url}/{name.folder}", may_be_empty=True).files)
                if num != num_found:
                    since_s = time.monotonic()
                    # The first look is no progress: a mirror that tries again and again would never end.
                    if num_found >= 0:
                        self.progress.relative_update()
                    num_found = num
                if time.monotonic() - since_s > _PATIENCE_S:
                    raise UserError(f"process {part} sends no part of {name.folder}")
                with contextlib.suppress(FileNotFoundError):
                    path = f"{self._root}/{name.part(self.lock.number, part)}"
                    files = self._system.cat_file(path)
                    break
                time.sleep(_ASK_S)
            found = json.loads(files)
            if found is None:
                return {}
            whole = {x: about for x, about in found.items() if x != PART} | whole
        return whole

    def _remove_others(self, sent: StepName) -> None:
        found = Listing(f"{self._url}/{sent.stage}", may_be_empty=True).files
        names = [f"{sent.stage}{x}" for x in found]
        here = [x for x in checkpoints_of(self._names()) if x.stage == sent.stage]
        complete = [x for x in manifests_of(names) if x <= max([sent, *here])]
        kept = {*complete[-self._keep :], *here} if self._keep else {*complete, *here}
        for name in {*checkpoints_of(names), *manifests_of(names)} - kept:
            # The manifest goes first: what is left is no checkpoint.
            self._remove(name.manifest)
            for each in names:
                if each.startswith(name.folder):
                    self._remove(each)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")
        self._sent.pop(name, None)

    def _write_note(self) -> None:
        partial = self._folder / f"{NOTE}.tmp"
        note = {"number": self.lock.number, "sent": self._sent, "parts": self._num_parts}
        partial.write_text(json.dumps(note))
        partial.replace(self._folder / NOTE)


class PartMirror(Mirror):
    """The mirror of a host besides the first one, which has the lock: it sends its parts of checkpoints.

    Args:
      part: number of the process.
      number: number of the lock.
    """

    def __init__(self, *args: Any, part: int, number: int, **options: Any):
        super().__init__(*args, **options)
        self._part, self.lock.number, self.lock.before = part, number, number - 1
        self._answered: set[StepName] = set()

    def open(self) -> None:
        """Fetches the run, in place of what this host has of it."""
        self._take_from_bucket(Listing(self._url, may_be_empty=True))
        self._write_note()

    def send(self, *, everything: bool) -> None:
        """Sends the parts that the first host asks for, or says that they are gone."""
        # Read first: what is not here then will not come.
        has_ended, here = self.ended.is_set(), manifests_of(self._names())
        staged = self._folder / _SENDING
        for name in here:
            # Kept aside until it is asked for, or a newer one is.
            if not self._is_sent(name.manifest) and self._link(name):
                self._sent[name.manifest] = _state(staged / name.folder / NOTE)
        asks = f"{PARTS_OF_HOSTS}{self.lock.number}.0"
        asked = asked_of([*Listing(f"{self._url}/{asks}", may_be_empty=True).files])
        for name in sorted(asked - self._answered):
            folder, files = staged / name.folder, None
            if (folder / NOTE).exists():
                ask = f"{self._root}/{name.part(self.lock.number, 0)}"
                first = json.loads(self._system.cat_file(ask))
                files = json.loads((folder / NOTE).read_bytes())
                files = {x: about for x, about in files.items() if x not in first}
                self._put_all({name.folder + x: folder / x for x in files})
            elif not has_ended and not _newer(name, here):
                continue
            own = f"{self._root}/{name.part(self.lock.number, self._part)}"
            self._system.pipe_file(own, json.dumps(files).encode())
            self._answered.add(name)
        done = self._answered - asked
        there = [x.relative_to(staged).as_posix() for x in staged.rglob("*") if x.is_file()]
        for name in checkpoints_of(there):
            if name in done or (name not in here and _newer(name, done)):
                shutil.rmtree(staged / name.folder)

    def left(self) -> list[str]:
        """Nothing: the first host names what is not whole."""
        return []

    def run(self) -> None:
        """Sends until the first host has ended, or says nothing for as long as it may be silent."""
        while not self.ended.wait(_ASK_S):
            with contextlib.suppress(Exception):  # the first host says what fails
                self.send(everything=False)
        seen, since_s = None, time.monotonic()
        while time.monotonic() - since_s < STALE_S:
            with contextlib.suppress(Exception):
                self.send(everything=True)
            with contextlib.suppress(Exception):
                number, holder = self.lock.newest()
                if number != self.lock.number or holder["state"] == "released":
                    return
                if holder != seen:
                    seen, since_s = holder, time.monotonic()
                    self.progress.relative_update()
            time.sleep(_ASK_S)


def _newer(name: StepName, others: Iterable[StepName]) -> bool:
    """Whether any of them is a later step of the same stage."""
    return any(x.stage == name.stage and x > name for x in others)


def _state(path: pathlib.Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    """Runs the process; prints a JSON object once the run may begin, and another one at the end."""
    url, folder, keep, owner, *apart = argv
    parts, part, lock_number = map(int, apart or (1, 0, 0))
    run = os.getppid()
    # Signals are for the run: this process ends after it, and takes no time of it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    # Clients write a traceback of what they try again.
    logging.disable(logging.CRITICAL)
    try:
        with told(url, "used"):
            system, root = fsspec.core.url_to_fs(url)
            lock = BucketLock(system, root, url, owner, run)
            place = url, pathlib.Path(folder), int(keep), lock
            if part:
                mirror = PartMirror(*place, parts=parts, part=part, number=lock_number)
            else:
                mirror = Mirror(*place, parts=parts)
                lock.take()
                # Fetching may take longer than a lock without a heartbeat lasts.
                threading.Thread(target=_show_life, args=(mirror,), daemon=True).start()
            try:
                mirror.open()
            except BaseException:
                with contextlib.suppress(Exception):
                    lock.beat("released")
                raise
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"number": lock.number}), flush=True)
    sender = threading.Thread(target=mirror.run, daemon=True)
    sender.start()
    while os.getppid() == run and not select.select([sys.stdin], [], [], 1)[0]:
        if mirror.taken_by:
            _say(f"{url} was taken over by {mirror.taken_by}; this run stops")
            os.kill(run, signal.SIGTERM)
            select.select([sys.stdin], [], [])
            break
    mirror.progress.relative_update()
    mirror.ended.set()
    with contextlib.suppress(Exception):
        lock.beat("ending")
    while sender.is_alive() and time.monotonic() - mirror.progress.at_s < _PATIENCE_S:
        sender.join(0.2)
    left = mirror.left() if mirror.fault or sender.is_alive() else []
    with contextlib.suppress(Exception):
        lock.beat("released")
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"left": left, "fault": mirror.fault or "no answer"}), flush=True)
    # Threads may hang in a call that never returns.
    os._exit(0)


def _show_life(mirror: Mirror) -> None:
    while not mirror.taken_by:
        time.sleep(BEAT_S)
        try:
            mirror.lock.beat("ending" if mirror.ended.is_set() else "held")
        except LockLost as error:
            mirror.taken_by = mirror.fault = str(error)
        except Exception:
            # `Mirror.run` says what fails.
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
