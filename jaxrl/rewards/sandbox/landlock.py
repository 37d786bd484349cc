"""Landlock and seccomp: what a process can take from itself without privileges or another program."""

from __future__ import annotations

from jaxrl.rewards.sandbox.lockdown import LANDLOCK_FILES, landlock_version
from jaxrl.rewards.sandbox.native import NativeSandbox
from jaxrl.rewards.sandbox.sandbox_interface import SandboxUnavailable


class Landlock(NativeSandbox):
    """Every right that the running kernel's Landlock knows, and the seccomp filter."""

    name = "landlock"
    gaps = (
        "programs can see which files exist, with size, owner and time, but read none outside Python, "
        "its packages and the system's libraries",
        "programs can see the names and numbers of this user and machine",
    )
    landlock = True

    def check(self) -> None:
        """Raises SandboxUnavailable if the kernel's Landlock is missing or too old."""
        version = landlock_version()
        if version < LANDLOCK_FILES:
            has = f"has version {version}" if version else "has no Landlock"
            raise SandboxUnavailable(
                f"this kernel {has}; version {LANDLOCK_FILES} came with Linux 6.2"
            )
        super().check()
