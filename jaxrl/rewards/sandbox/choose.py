"""Chooses the sandbox of a run: the named one, or the first that works on this machine."""

from __future__ import annotations

import functools
import logging

from jaxrl.errors import UserError
from jaxrl.rewards.sandbox.native import (
    Bubblewrap,
    Landlock,
    Sandbox,
    SandboxUnavailable,
    Unconfined,
)
from jaxrl.rewards.sandbox.webassembly import WebAssembly

logger = logging.getLogger(__name__)

SANDBOXES: dict[str, type[Sandbox]] = {
    kind.name: kind for kind in (Bubblewrap, WebAssembly, Landlock, Unconfined)
}
"""Sandboxes by name, in the order in which `auto` tries them; it never tries `none`."""


def choose_sandbox(choice: str) -> Sandbox:
    """Returns a sandbox that works on this machine.

    Args:
      choice: a name of `SANDBOXES`, or "auto" for the first one that works.

    Raises:
      UserError: the named sandbox does not work, or none does.
    """
    names = [name for name in SANDBOXES if name != "none"] if choice == "auto" else [choice]
    reasons = []
    for name in names:
        sandbox = SANDBOXES[name]()
        try:
            sandbox.check()
        except SandboxUnavailable as reason:
            reasons.append(f"{name}: {reason}")
        else:
            return sandbox
    raise UserError(
        "the grader 'code' runs programs that a model wrote, and no sandbox for them works on this machine: "
        f"reward.code_sandbox={choice!r} has tried {'; '.join(reasons)}; install bubblewrap, or set "
        "reward.code_sandbox='none' to run them with the rights of this user"
    )


@functools.cache
def logged_choice(choice: str) -> str:
    """Returns the name of the chosen sandbox; logs its gaps once."""
    sandbox = choose_sandbox(choice)
    logger.warning(
        "the grader 'code' runs programs in the sandbox %r, which has these limits: %s",
        sandbox.name,
        "; ".join(sandbox.gaps),
    )
    return sandbox.name


@functools.cache
def sandbox_called(name: str) -> Sandbox:
    """Returns this process's sandbox of a name in `SANDBOXES`, without checking it."""
    return SANDBOXES[name]()
