"""Bubblewrap (`bwrap`): namespaces of its own, in which only Python and the system's libraries exist."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from jaxrl.rewards.sandbox.native import READABLE, NativeSandbox
from jaxrl.rewards.sandbox.sandbox_interface import SandboxUnavailable


class Bubblewrap(NativeSandbox):
    """Mount, process, network, IPC, host name and user namespaces, and the seccomp filter."""

    name = "bubblewrap"
    gaps = ("programs can read Python, its packages and the system's libraries",)
    direct = False

    def command(self, python: Sequence[str]) -> list[str]:
        """The command line of `bwrap` around Python."""
        # No /proc: Python does not need it, and nothing of other processes is in it then.
        arguments = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
        arguments += ["--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox"]
        # As the first process of its namespace, Python is waited for by bwrap, so its time is counted.
        arguments += ["--as-pid-1"]
        for path in READABLE:
            arguments += ["--ro-bind-try", path, path]
        for device in ("/dev/null", "/dev/zero"):
            arguments += ["--dev-bind", device, device]
        # Bubblewrap makes the root a file system in memory, which programs could fill.
        arguments += ["--remount-ro", "/", "--chdir", "/"]
        # By its path: the environment of a program has no PATH. A relative one would start at "/".
        bwrap = os.path.abspath(shutil.which("bwrap") or "bwrap")
        return [bwrap, *arguments, "--", sys.executable, *python]

    def check(self) -> None:
        """Raises SandboxUnavailable if bwrap is missing or the machine refuses it namespaces."""
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable(
                "bwrap is not installed (apt install bubblewrap, dnf install bubblewrap)"
            )
        super().check()
