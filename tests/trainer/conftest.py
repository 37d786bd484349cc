"""A file system of a few kilobytes, which tests fill up."""

import gc
import os
import subprocess
import warnings

import pytest


class SmallDisk:
    """A file system of its own."""

    def __init__(self, path):
        self.path = path

    def resize(self, num_bytes: int) -> None:
        """Mounts it, empty, or changes its size."""
        again = "remount," if os.path.ismount(self.path) else ""
        options = ["-t", "tmpfs", "-o", f"{again}size={num_bytes}"]
        subprocess.run(["mount", *options, "tmpfs", self.path], check=True, capture_output=True)

    def leave(self, num_bytes: int) -> None:
        """Makes it so small that this much can still be written."""
        free = os.statvfs(self.path)
        self.resize((free.f_blocks - free.f_bfree) * free.f_frsize + num_bytes)

    def close(self) -> None:
        """Takes it away."""
        if os.path.ismount(self.path):
            subprocess.run(["umount", "-l", self.path], check=True)


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    disk = SmallDisk(path)
    try:
        disk.resize(300_000)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    # Orbax closes its event loop at the first error, with writes still waiting in it. What TensorStore and
    # Python say of them belongs to this test, not to whichever runs when they are collected.
    warnings.filterwarnings("ignore", message="Exception ignored in")
    yield disk
    disk.close()
    gc.collect()
