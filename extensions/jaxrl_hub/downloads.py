"""Fetches models and data sets from the Hugging Face hub into its local cache (`HF_HOME`).

Only formats that hold no code are fetched: safetensors and JSON of a model; Parquet, JSON and Arrow of a data
set. A fetched file is compared with the hub's checksum. Without a network, the cache is used as it is.

A hub may be slow, broken or not what it says. What holds:

    names of files, and the commit    checked before anything is written: no part leads to another folder
    an answer about a repository      within `ANSWER_S`
    files                             must fit on the disk, grow within `STALL_S`, and end at the size of the
                                      largest file that the hub tells

What does not hold: the size of an answer about a repository is bounded by its time alone, and
`huggingface_hub` makes paths of ETags, by which a hostile hub can write outside the cache. Set HF_ENDPOINT
only to hubs that you trust.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import os
import pathlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from jaxrl.errors import UserError
from jaxrl.hub.hub_names import MODEL_FILES, HubName, fetch_hint
from jaxrl_hub.splits import DATA_FILES, choose_files, declared_splits, inferred_splits

Kind = Literal["model", "dataset"]

ANSWER_S = 60.0
# `huggingface_hub` writes pieces of 10 MB, of each of the files that come at once: slower than 70 kB/s in all
# looks like no growth.
STALL_S = 600.0
_AT_ONCE, _LOOK_EVERY_S = 4, 0.5
# The largest file of a repository whose hub tells no sizes.
_UNSIZED_BYTES = 1 << 28

_REMEDY = "check HF_ENDPOINT and the proxy, or put the files into a directory and name that"
_NAME = re.compile(r"\w[\w.+:=-]*")
_PART = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00-\x1f]+"
_PATH = re.compile(f"{_PART}(?:/{_PART})*")

# Weights that can run code when they are read, and formats of other programs.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5")
_CONVERTED = "refs/convert/parquet"
# `HTTPError` is that of the HTTP library; answers with an error status are its subclass `HfHubHTTPError`.
_NO_NETWORK = (
    hub_errors.HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    hub_errors.OfflineModeIsEnabled,
)
# What reading an answer of another form raises, here and in huggingface_hub.
_MALFORMED = (ValueError, TypeError, AttributeError, LookupError, AssertionError, RecursionError)


class Hub:
    """The hub, or a server with its interface.

    Attributes:
      endpoint: address of the server.
    """

    def __init__(self, *, endpoint: str | None = None, cache_dir: str | pathlib.Path | None = None):
        """Args:
        endpoint: address of the server; None takes `HF_ENDPOINT`, or huggingface.co.
        cache_dir: cache of repositories; None takes the one of `HF_HOME`.
        """

        self.endpoint = endpoint or constants.ENDPOINT
        self._api = huggingface_hub.HfApi(endpoint=self.endpoint)
        self._cache = pathlib.Path(cache_dir or constants.HF_HUB_CACHE)

    def check_model(self, name: HubName, *, tokenizer_only: bool = False) -> None:
        """Asks the hub whether `model` would find its files, and fetches none.

        Raises:
          UserError: the hub cannot provide the model, and the cache does not hold it.
        """
        info = self._info(name, "model")
        if info is None:
            self._cached(name, "model")
        else:
            _model_files(name, info, tokenizer_only=tokenizer_only)

    def model(self, name: HubName, *, tokenizer_only: bool = False) -> pathlib.Path:
        """Fetches what is missing of a model.

        Args:
          name: of the model; its subset and split are "".
          tokenizer_only: the files of the tokenizer suffice.

        Returns:
          The directory of the files, in the cache.

        Raises:
          UserError: there is no such model, it needs a token, it has no safetensors, or it can be neither
            fetched nor found in the cache.
        """
        info = self._info(name, "model")
        files = info and _model_files(name, info, tokenizer_only=tokenizer_only)
        folder = self._fetch(name, "model", info, files or ())
        # A link to the snapshot with the model's name, which tables and servers show.
        link = self._cache / "jaxrl" / folder.name / name.repo.split("/")[1]
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(link):
                link.symlink_to(folder)
        except OSError:
            return folder  # a cache that is read-only
        return link

    def check_rows(self, name: HubName, splits: Sequence[str]) -> None:
        """Asks the hub whether `rows` would find its files, and fetches none.

        Raises:
          UserError: as `rows`.
        """
        self._choose(name, splits)

    def rows(self, name: HubName, splits: Sequence[str]) -> pathlib.Path:
        """Fetches what is missing of one split of a data set.

        Args:
          name: of the data set.
          splits: names of the split, best first, if `name` has none. A data set with one split has that one.

        Returns:
          A directory with all files of the split and no others; its name is that of the data set.

        Raises:
          UserError: there is no such data set, subset or split, it needs a token, it has no file that can be
            read, or it can be neither fetched nor found in the cache.
        """
        name, info, files = self._choose(name, splits)
        folder = self._fetch(name, "dataset", info, files)
        # Links to the files of this split alone.
        chosen = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
        links = self._cache / "jaxrl" / folder.name / chosen / name.repo.split("/")[1]
        links.mkdir(parents=True, exist_ok=True)
        for file in files:
            link = links / file.replace("/", "-")
            if not os.path.lexists(link):
                link.symlink_to(folder / file)
        return links

    def push_model(self, folder: pathlib.Path, name: HubName, *, private: bool) -> str:
        """Uploads a directory as a model; makes the repository if there is none.

        Returns:
          The address of the model's page.

        Raises:
          UserError: no token, no right to write there, or no network.
        """
        try:
            self._api.create_repo(name.repo, private=private, exist_ok=True)
            self._api.upload_folder(
                repo_id=name.repo,
                folder_path=folder,
                revision=name.revision or None,
                commit_message="Upload a model trained by jaxrl",
            )
        except (hub_errors.HfHubHTTPError, hub_errors.LocalTokenNotFoundError) as error:
            raise UserError(
                f"{self.endpoint} did not take {name}: {_first_line(error)}; run `hf auth login` with a "
                "token that may write there"
            ) from error
        except _NO_NETWORK as error:
            raise UserError(
                f"{self.endpoint} cannot be reached ({_first_line(error)}); {folder} holds the model, push "
                "it later"
            ) from error
        return f"{self.endpoint}/{name.repo}"

    def _choose(self, name: HubName, splits: Sequence[str]) -> tuple[HubName, Any, list[str]]:
        """(the name with its revision, the hub's answer or None without a network, files of the split)."""
        # The hub converts data sets of other formats itself, on a branch of its own.
        converted = dataclasses.replace(name, revision=_CONVERTED)
        refusals = []
        for each in [name] if name.revision else [name, converted]:
            try:
                info = self._info(each, "dataset")
                if info is None:
                    folder = self._cached(each, "dataset")
                    files = (path for path in folder.rglob("*") if path.is_file())
                    names = sorted(path.relative_to(folder).as_posix() for path in files)
                else:
                    names = sorted(sibling.rfilename for sibling in info.siblings or ())
            except UserError as error:
                refusals.append(error)
                continue
            try:
                declared = info and declared_splits(info)
            except _MALFORMED as error:
                raise UserError(
                    f"the card of data set {name.repo} does not list its files as `configs` of `data_files` "
                    f"({_first_line(error)}); put the files that you want into a directory and name that"
                ) from error
            if found := declared or inferred_splits(names):
                return each, info, choose_files(name, found, splits)
            refusals.append(
                UserError(
                    f"data set {name} has no {', '.join(DATA_FILES)} file; it has {_some(names)}: convert "
                    "it, or name another"
                )
            )
        # About the name as it was given, not about the hub's converted branch.
        raise refusals[0]

    def _info(self, name: HubName, kind: Kind) -> Any:
        """The hub's answer about a repository; None without a network."""
        ask = functools.partial(
            self._api.repo_info,
            name.repo,
            repo_type=kind,
            revision=name.revision or None,
            files_metadata=True,
        )
        try:
            asked = _in_thread(ask)
            if not concurrent.futures.wait([asked], timeout=ANSWER_S).done:
                raise self._left(f"has not answered about {name} within {ANSWER_S:g} s")
            info = asked.result()
            told = [(info.sha, _NAME), *((s.rfilename, _PATH) for s in info.siblings or ())]
            for text, form in told:
                if not form.fullmatch(text):
                    raise UserError(
                        f"{self.endpoint} tells {text[:80]!r} of {name}, which is no name of a file; "
                        f"{_REMEDY}"
                    )
        # Below it would pass for a malformed answer, since a UserError is a ValueError.
        except UserError:
            raise
        except hub_errors.HfHubHTTPError as error:
            # A hub that is down is like no network: the cache serves.
            if error.response is not None and error.response.status_code >= 500:
                return None
            raise self._refusal(error, name, kind) from error
        except hub_errors.HFValidationError as error:
            raise self._refusal(error, name, kind) from error
        except _NO_NETWORK:
            return None
        except _MALFORMED as error:
            raise UserError(
                f"{self.endpoint} answers about {name} in a form that no hub has ({_first_line(error)}); "
                f"{_REMEDY}"
            ) from error
        if getattr(info, "gated", False) and huggingface_hub.get_token() is None:
            raise UserError(self._gated(name))
        return info

    def _fetch(self, name: HubName, kind: Kind, info: Any, files: Sequence[str]) -> pathlib.Path:
        if info is None:
            return self._cached(name, kind)
        cached = functools.partial(
            huggingface_hub.try_to_load_from_cache,
            name.repo,
            cache_dir=self._cache,
            revision=info.sha,
            repo_type=kind,
        )
        # Files in the cache were compared when they came.
        new = [file for file in files if not cached(filename=file)]
        try:
            # One file in any case: the cache then knows the revision without a network.
            self._download(name, kind, info, new or files[:1])
        except UserError:
            raise
        except (*_NO_NETWORK, OSError, *_MALFORMED) as error:
            raise self._refusal(error, name, kind) from error
        folder = self._repository(name, kind) / "snapshots" / info.sha
        if absent := [file for file in files if not (folder / file).exists()]:
            raise UserError(
                f"{self.endpoint} sent {_some(absent)} of another commit of {name} than it told; run the "
                "command again, or name a commit as the revision"
            )
        checksums = {s.rfilename: s.lfs.sha256 for s in info.siblings if s.lfs is not None}
        for file in new:
            if file not in checksums:
                continue
            path, expected = folder / file, checksums[file]
            with path.open("rb") as content:
                found = hashlib.file_digest(content, "sha256").hexdigest()
            if found != expected:
                # The content, and the link to it: else the cache would give the damaged file to the next run.
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise UserError(
                    f"{path.name} arrived damaged (SHA-256 {found[:12]}..., the hub has {expected[:12]}...) "
                    "and was removed; run the command again"
                )
        return folder

    def _download(self, name: HubName, kind: Kind, info: Any, files: Sequence[str]) -> None:
        """Downloads files in threads, and leaves a hub that does not bring them to an end."""
        # `huggingface_hub` compares sizes only when a file is complete: one without end would fill the disk.
        sizes = {s.rfilename: s.size or 0 for s in info.siblings}
        largest = max(sizes.values()) or _UNSIZED_BYTES
        blobs = self._repository(name, kind) / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        if (needed := sum(map(sizes.__getitem__, files))) > (free := shutil.disk_usage(blobs).free):
            raise UserError(
                f"{name} needs {needed:,} bytes in {self._cache}, where {free:,} are free; set HF_HOME to a "
                "folder on a larger disk"
            )

        def download(some: Sequence[str]) -> None:
            for file in some:
                self._api.hf_hub_download(
                    name.repo,
                    file,
                    repo_type=kind,
                    # Not by its commit: the cache would not know the revision.
                    revision=name.revision or None,
                    cache_dir=self._cache,
                )

        # Files of earlier downloads may be larger: of another revision, or what a killed process left.
        old = {path.name for path in blobs.iterdir()}
        tasks = [
            _in_thread(functools.partial(download, files[i::_AT_ONCE])) for i in range(_AT_ONCE)
        ]
        most, since = 0, time.monotonic()
        while True:
            ended, waiting = concurrent.futures.wait(tasks, _LOOK_EVERY_S, "FIRST_EXCEPTION")
            for task in ended:
                try:
                    task.result()
                except RecursionError as error:
                    # `huggingface_hub` calls itself for each transfer that broke, and counts only those that
                    # brought nothing.
                    raise self._left(f"breaks off each transfer of a file of {name}") from error
            if not waiting:
                return
            written, now = 0, time.monotonic()
            for path in blobs.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    # XET may set the size of a file before it writes the blocks.
                    written += stat.st_size + 512 * stat.st_blocks
                    if path.name not in old and stat.st_size > largest:
                        raise self._left(f"sent more bytes of a file of {name} than it told")
            # Not a change: a transfer that breaks and starts anew each time would go on forever.
            if written > most:
                most, since = written, now
            elif now - since > STALL_S:
                raise self._left(f"sent nothing new of {name} for {STALL_S:g} s")

    def _left(self, fault: str) -> UserError:
        # The threads that still read end with their connections.
        huggingface_hub.close_session()
        return UserError(f"{self.endpoint} {fault}; {_REMEDY}")

    def _repository(self, name: HubName, kind: Kind) -> pathlib.Path:
        """The folder of a repository in the cache, which has `blobs` and `snapshots`."""
        return self._cache / f"{kind}s--{name.repo.replace('/', '--')}"

    def _cached(self, name: HubName, kind: Kind) -> pathlib.Path:
        """The directory of a repository in the cache."""
        try:
            folder = huggingface_hub.snapshot_download(
                name.repo,
                repo_type=kind,
                revision=name.revision or None,
                cache_dir=self._cache,
                local_files_only=True,
                # The cache holds the files that were chosen, not the whole repository.
                allow_patterns=["config.json"] if kind == "model" else ["no file"],
            )
        except (hub_errors.LocalEntryNotFoundError, hub_errors.IncompleteSnapshotError) as error:
            raise UserError(
                f"{name} is no directory here, {self.endpoint} cannot be reached, and {self._cache} does not "
                "hold it; put its files into a directory and name that, or fetch it where there is a network "
                f"and set HF_HOME to a copy of that cache{fetch_hint(name.repo)}"
            ) from error
        return pathlib.Path(folder)

    def _refusal(self, error: Exception, name: HubName, kind: Kind) -> UserError:
        if isinstance(error, hub_errors.GatedRepoError):
            return UserError(self._gated(name))
        if isinstance(error, hub_errors.RevisionNotFoundError):
            return UserError(f"{name.repo} has no revision {name.revision!r} at {self.endpoint}")
        if isinstance(error, hub_errors.RepositoryNotFoundError):
            return UserError(
                f"{name} is no path here, and {self.endpoint} has no such {kind}; check the name, or run "
                "`hf auth login` if it is private"
            )
        if isinstance(error, hub_errors.HFValidationError):
            return UserError(f"{name} is no path here and no name on the hub: {_first_line(error)}")
        return UserError(
            f"{name} could not be fetched from {self.endpoint}: {_first_line(error)}; run the command again, "
            "it goes on where it stopped"
        )

    def _gated(self, name: HubName) -> str:
        return (
            f"{name} needs an account that accepted its terms; accept them on {self.endpoint}/{name.repo}, "
            "then run `hf auth login` or set HF_TOKEN"
        )


def _in_thread(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Starts `work` in a daemon, which does not keep a process that leaves it."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    return future


def _model_files(name: HubName, info: Any, *, tokenizer_only: bool) -> list[str]:
    """Files to fetch of a model: those in its main directory, in formats that hold no code."""
    names = sorted(s.rfilename for s in info.siblings or () if "/" not in s.rfilename)
    found = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in MODEL_FILES)]
    if tokenizer_only:
        if not (found := [n for n in found if ".safetensors" not in n]):
            raise UserError(f"{name} has no tokenizer; it has {_some(names)}: name another model")
        return found
    if any(n.endswith(".safetensors") for n in found):
        return found
    others = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in _OTHER_WEIGHTS)]
    has = f"only {_some(others)}" if others else "no weights"
    raise UserError(
        f"{name} has {has}; jaxrl reads safetensors, which hold no code: take a revision that has them, or "
        "convert it with save_pretrained of Transformers"
    )


def _some(names: Sequence[str], *, at_most: int = 4) -> str:
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return (", ".join(names[:at_most]) or "no file") + more


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
