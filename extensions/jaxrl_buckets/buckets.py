"""Weights, tokenizers and data in buckets: `gs://bucket/path`, `s3://bucket/path`, fetched into a cache.

    gs://b/qwen  --what the store lists: names, sizes, versions-->  <cache>/buckets/gs/b/<digest>/qwen
                                                                    there already, or fetched and renamed

The folder's name is a digest of the list: what has changed in a bucket is another folder, and a folder that
is there is whole. Of a model only configuration, tokenizer and safetensors are fetched. Clients are fsspec's,
gcsfs and s3fs, with the credentials that they find.

Not covered: reading slices of weights without a copy on the disk. `mirror` writes to buckets.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fnmatch
import hashlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from jaxrl.errors import UserError
from jaxrl.files import cache_root
from jaxrl.hub.hub_names import MODEL_FILES

# gcsfs asks for the kind of a bucket by gRPC first, which hangs for a minute behind a proxy.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

AT_ONCE = 8
PARTS = re.compile(r"\.parts/\d{16}$")
"""End of the name of a part of a file that grows: the offset of its first byte."""
_EXTRAS = {"gs": "gcs", "s3": "s3"}
# What stores say of the version of an object, by the names of gcsfs, s3fs and fsspec's own file systems.
_VERSIONS = ("etag", "ETag", "generation", "md5Hash", "mtime", "LastModified", "created")
_ROWS = (
    "*.json",
    "*.jsonl",
    "*.parquet",
    "*.arrow",
    "*.csv",
    "*.tsv",
    "*.gz",
    "*.bz2",
    "*.xz",
    "*.zst",
)


class Buckets:
    """Fetches what settings name in buckets. The methods are those of `jaxrl_hub.downloads.Hub`."""

    def check_model(self, url: str, *, tokenizer_only: bool = False) -> None:
        """Raises UserError unless `model` would find its files."""
        with told(url):
            _model_files(url, Listing(url), tokenizer_only=tokenizer_only)

    def model(self, url: str, *, tokenizer_only: bool = False) -> pathlib.Path:
        """Fetches a model's folder, or its tokenizer alone; returns the folder in the cache.

        Raises:
          UserError: it is not there, cannot be read, or does not fit on the disk.
        """
        with told(url):
            listing = Listing(url)
            return listing.fetch(_model_files(url, listing, tokenizer_only=tokenizer_only))

    def check_rows(self, url: str, splits: Sequence[str]) -> None:
        """Raises UserError unless `rows` would find its files."""
        with told(url):
            _row_files(url, Listing(url))

    def rows(self, url: str, splits: Sequence[str]) -> pathlib.Path:
        """Fetches a file, or a folder of files of rows; returns its path in the cache.

        Raises:
          UserError: as for `model`.
        """
        with told(url):
            listing = Listing(url)
            return listing.fetch(_row_files(url, listing))


class Listing:
    """The objects below an address.

    Attributes:
      files: description of each object by its name below the address; "" is the address itself.

    Args:
      url: the address.
      may_be_empty: whether there may be none.

    Raises:
      UserError: there is none.
    """

    def __init__(self, url: str, *, may_be_empty: bool = False):
        self._url = url
        self._system, self._root = fsspec.core.url_to_fs(url.rstrip("/"))
        self._system.invalidate_cache()
        found = self._system.find(self._root, detail=True)
        # A folder that somebody has made by hand is an object whose name ends with a slash.
        self.files: dict[str, Any] = {
            name.removeprefix(self._root).lstrip("/"): about
            for name, about in found.items()
            if about.get("type") != "directory" and not name.endswith("/")
        }
        if not (self.files or may_be_empty):
            raise UserError(
                f"{url}: nothing is there; list the bucket, and name a file or a folder of it"
            )

    def fetch(self, names: Sequence[str]) -> pathlib.Path:
        """Fetches objects into the cache, all or none of them; returns the path of the address there."""
        sizes = {name: int(self.files[name].get("size") or 0) for name in names}
        versions = [
            (name, sizes[name], *(str(self.files[name].get(key)) for key in _VERSIONS))
            for name in sorted(names)
        ]
        digest = hashlib.blake2b(repr(versions).encode(), digest_size=8).hexdigest()
        scheme, _, path = self._url.rstrip("/").partition("://")
        bucket, *_, last = path.split("/")
        folder = cache_root() / "buckets" / scheme / bucket / digest
        if folder.is_dir():
            return folder / last
        folder.parent.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(folder.parent).free, sum(sizes.values())
        if needed > free:
            raise UserError(
                f"{self._url} has {needed / 1e9:.1f} GB, and {folder.parent} {free / 1e9:.1f} GB of room; "
                "free some, or let XDG_CACHE_HOME name a larger disk"
            )
        # Beside its place: a rename is of one disk. One that was cut off is in nobody's way.
        partial = pathlib.Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=folder.parent))
        try:
            self.get(names, partial / last)
            join_parts(partial)
            # Another process may have been quicker.
            with contextlib.suppress(OSError):
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():
            raise UserError(
                f"{folder} cannot be written; remove what is there, or set XDG_CACHE_HOME"
            )
        return folder / last

    def get(self, names: Sequence[str], target: pathlib.Path) -> None:
        """Fetches objects to their names below a path."""
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            getting = [
                pool.submit(self._get, name, target, int(self.files[name].get("size") or 0))
                for name in names
            ]
            for each in getting:
                each.result()

    def _get(self, name: str, target: pathlib.Path, size: int) -> None:
        path = target / name if name else target
        if not path.resolve().is_relative_to(target.parent.resolve()):
            raise UserError(f"{self._url} has an object {name!r}, which leads out of it; rename it")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._system.get_file(f"{self._root}/{name}" if name else self._root, str(path))
        if path.stat().st_size != size:
            raise UserError(
                f"{self._url}: {name or 'it'} has {path.stat().st_size:,} bytes, and its store says "
                f"{size:,}; somebody is writing it: try again when it is whole"
            )


def _model_files(url: str, listing: Listing, *, tokenizer_only: bool) -> list[str]:
    wanted = [
        pattern for pattern in MODEL_FILES if not (tokenizer_only and "safetensors" in pattern)
    ]
    found = [n for n in listing.files if any(fnmatch.fnmatchcase(n, p) for p in wanted)]
    # A pattern's star takes slashes, too; a folder below is another model.
    found = [n for n in found if "/" not in n or n.startswith("additional_chat_templates/")]
    if not any(name.endswith(("config.json", "tokenizer.json")) for name in found):
        raise UserError(
            f"{url} has no config.json and no tokenizer.json; name the folder of a Hugging Face model"
        )
    return found


def _row_files(url: str, listing: Listing) -> list[str]:
    if "" in listing.files:
        return [""]
    found = [n for n in listing.files if any(fnmatch.fnmatchcase(n, p) for p in _ROWS)]
    if not found:
        raise UserError(
            f"{url} has no file of rows ({', '.join(_ROWS)}); name one, or their folder"
        )
    return found


def join_parts(folder: pathlib.Path) -> None:
    """Makes one file of each folder of parts below a folder: those that follow on each other."""
    for parts in [path for path in folder.rglob("*.parts") if path.is_dir()]:
        with parts.with_suffix("").open("wb") as whole:
            for part in sorted(parts.iterdir()):
                if int(part.name) != whole.tell():
                    break
                whole.write(part.read_bytes())
        shutil.rmtree(parts)


def reason_of(error: Exception) -> str:
    """What a client of a store has raised, in some words."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def told(url: str, done: str = "read") -> Iterator[None]:
    """Turns what clients of stores raise into one line; `done` is what could not be done."""
    scheme = url.partition("://")[0]
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        extra = _EXTRAS.get(scheme, scheme)
        raise UserError(
            f"{url} needs a client of its store ({error}); pip install 'jaxrl[{extra}]'"
        ) from error
    except Exception as error:  # each client has its own
        raise UserError(
            f"{url} cannot be {done} ({reason_of(error)}); check the address, and that this "
            "machine has credentials for it (GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE, or its own)"
        ) from error
