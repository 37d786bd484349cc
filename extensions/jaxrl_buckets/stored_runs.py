"""Runs in buckets: their objects, and what of them is fetched.

The tree is that of a run's folder (docs/runs.md), with two differences: files that grow are folders of parts,
`metrics.jsonl.parts/<offset>`, and `lock` is a folder (`bucket_lock`).
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import zlib
from typing import NamedTuple

from jaxrl.errors import UserError
from jaxrl.files import cache_root
from jaxrl_buckets.buckets import Listing, told

MANIFEST = re.compile(r"(?P<stage>.*/)checkpoints\.manifests/(?P<step>\d+)\.json")
"""Name of a manifest."""

_CHECKPOINT = re.compile(r"(?P<stage>.*/)checkpoints/(?P<step>\d+)/.+")
PARTS_OF_HOSTS = "parts/"
"""Folder of the manifests of what one host has of a checkpoint."""
PART = "../../hosts"
"""Key of such a manifest, as `tracking.checkpoints` has it."""
_BESIDE_ROWS = re.compile(r"(lock|parts)/|(.*/)?checkpoints(\.manifests|\.damaged)?/")
_BESIDE_WEIGHTS = re.compile(r"config\.txt|(model|inputs)/.*")
_BLOCK_BYTES = 2**20


class StepName(NamedTuple):
    """A checkpoint by its stage, such as "rl/", and its step. They are in order of stage, then step."""

    stage: str
    step: int

    @property
    def manifest(self) -> str:
        return f"{self.stage}checkpoints.manifests/{self.step}.json"

    def part(self, lock: int, process: int) -> str:
        """Object with the manifest of what one process has of it, under a number of the lock."""
        return f"{PARTS_OF_HOSTS}{lock}.{process}/{self.stage}{self.step}.json"

    @property
    def folder(self) -> str:
        return f"{self.stage}checkpoints/{self.step}/"


def manifests_of(names: list[str]) -> list[StepName]:
    """The checkpoints with a manifest among names of objects, in order."""
    found = filter(None, map(MANIFEST.fullmatch, names))
    return sorted(StepName(x["stage"], int(x["step"])) for x in found)


def asked_of(names: list[str]) -> set[StepName]:
    """The checkpoints of objects below the folder of `StepName.part`."""
    found = (name.removesuffix(".json").rpartition("/") for name in names)
    return {StepName(f"{stage}/", int(step)) for stage, _, step in found}


def checkpoints_of(names: list[str]) -> list[StepName]:
    """The checkpoints of which any object is there, in order."""
    found = filter(None, map(_CHECKPOINT.fullmatch, names))
    return sorted({StepName(x["stage"], int(x["step"])) for x in found})


def sizes_of(manifest: bytes) -> dict[str, int]:
    """The size of each file of a checkpoint, by a manifest of `tracking.checkpoints`."""
    # The rows of metrics are in it, by a path that leads out of the checkpoint.
    return {k: size for k, (size, *_) in json.loads(manifest).items() if not k.startswith("../")}


def is_whole(folder: pathlib.Path, name: StepName) -> bool:
    """Whether a checkpoint that was fetched into a folder is what its manifest says."""
    try:
        manifest = (folder / name.manifest).read_bytes()
        for path in sizes_of(manifest):
            crc = 0
            with (folder / name.folder / path).open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    crc = zlib.crc32(block, crc)
                size = file.tell()
            if json.loads(manifest)[path] != [size, crc]:
                return False
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    return True


def rows_of(listing: Listing) -> list[str]:
    """The objects of a run besides its lock and its checkpoints."""
    return [name for name in listing.files if not _BESIDE_ROWS.match(name)]


def checkpoint_objects(listing: Listing, name: StepName) -> list[str]:
    """The objects of a checkpoint, and its manifest."""
    found = [each for each in listing.files if each.startswith(name.folder)]
    return [*found, name.manifest]


def read_run(url: str, what: str) -> pathlib.Path:
    """Fetches a run into the cache of buckets.

    Args:
      url: address of the run.
      what: "rows": all but checkpoints. "weights": settings, model and the newest intact checkpoint.
        "all": everything.

    Returns:
      A folder with the name of the run and links to what was fetched.

    Raises:
      UserError: it is not there or cannot be read, or has no intact checkpoint.
    """
    with told(url):
        listing = Listing(url)
        if "config.txt" not in listing.files:
            raise UserError(
                f"{url} is no run: it has no config.txt; name the folder of a run, such as {url}/seed0"
            )
        if what != "weights":
            every = [x for x in listing.files if not x.startswith("lock/")]
            return _linked(listing.fetch(every if what == "all" else rows_of(listing)), url, what)
        base = [name for name in listing.files if _BESIDE_WEIGHTS.fullmatch(name)]
        # Later stages first: their weights are newer.
        order = {"rl/": 2, "preference/": 1, "sft/": 0}
        found = [x for x in manifests_of([*listing.files]) if x.stage in order]
        for name in sorted(found, key=lambda x: (order[x.stage], x.step), reverse=True):
            folder = listing.fetch(base + checkpoint_objects(listing, name))
            if is_whole(folder, name):
                return _linked(folder, url, what)
            print(f"{url}/{name.folder} is damaged, and is skipped", file=sys.stderr)
        raise UserError(
            f"{url} has no intact checkpoint; let its run save one, or name another run"
        )


def _linked(fetched: pathlib.Path, url: str, what: str) -> pathlib.Path:
    # Results are named after the run's folder, and not after a digest.
    folder = cache_root() / "read" / what / url.rstrip("/").replace(":", "", 1)
    folder.mkdir(parents=True, exist_ok=True)
    for path in fetched.iterdir():
        partial = folder / f".{path.name}.{os.getpid()}"
        partial.symlink_to(path)
        partial.replace(folder / path.name)
    return folder


def fetch_run(listing: Listing, folder: pathlib.Path) -> list[str]:
    """Fetches what a run needs to go on: all but checkpoints before the newest intact one of each stage.

    Args:
      listing: the objects of the run.
      folder: folder to fetch them into.

    Returns:
      What is damaged or half written, a line each. Damaged checkpoints are fetched, too.
    """
    listing.get(rows_of(listing), folder)
    names = manifests_of([*listing.files])
    halves = [x for x in checkpoints_of([*listing.files]) if x not in names]
    faults = [f"{name.folder} is half written: it has no manifest" for name in halves]
    intact = set()
    for name in reversed(names):
        if name.stage not in intact:
            listing.get(checkpoint_objects(listing, name), folder)
            if is_whole(folder, name):
                intact.add(name.stage)
            else:
                faults.append(f"{name.folder} is damaged")
    return faults
