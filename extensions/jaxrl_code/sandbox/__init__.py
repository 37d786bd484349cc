"""Sandboxes for code that a model wrote; `choose_sandbox` picks one that works on this machine.

    bubblewrap    namespaces by `bwrap`, and a seccomp filter     best; needs the program and user namespaces
    landlock      Landlock and a seccomp filter                   Linux 6.2; outside paths are visible
    none          limits of time and memory                       only if asked for

In the first two a program cannot start another process. So its memory limit bounds its total use, and
nothing remains after it is killed. It can write no file, so it cannot fill a disk.
"""

from __future__ import annotations

import functools
import logging

from jaxrl.errors import UserError
from jaxrl_code.sandbox.native import (
    Bubblewrap,
    Landlock,
    Sandbox,
    SandboxUnavailable,
    Unconfined,
)

logger = logging.getLogger(__name__)

SANDBOXES: dict[str, type[Sandbox]] = {
    kind.name: kind for kind in (Bubblewrap, Landlock, Unconfined)
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
def check_landlock() -> None:
    """Checks that scorers of reasoning-gym can be locked down.

    Raises:
      UserError: Landlock or libseccomp does not work on this machine.
    """
    try:
        Landlock().check()
    except SandboxUnavailable as reason:
        raise UserError(
            "the grader 'reasoning_gym' evaluates answers that a model wrote, in processes that Landlock and "
            f"seccomp lock down, which does not work on this machine: {reason}; grade where they do, or set "
            "reward.code_sandbox='none' to evaluate them with the rights of this user"
        ) from reason


@functools.cache
def sandbox_called(name: str) -> Sandbox:
    """Returns this process's sandbox of a name in `SANDBOXES`, without checking it."""
    return SANDBOXES[name]()
