"""No sandbox: limits of time and memory alone, for machines that are thrown away after the run."""

from __future__ import annotations

from jaxrl.rewards.sandbox.native import NativeSandbox


class Unconfined(NativeSandbox):
    """A process with limits; `reward.code_sandbox="none"` selects it."""

    name = "none"
    gaps = (
        "programs can do all that this user can: read and change files, use the network, start processes "
        "with limits of their own",
    )
    seccomp = False
