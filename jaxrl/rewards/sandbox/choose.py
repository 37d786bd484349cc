"""Chooses the sandbox of a run: the named one, or the first that works on this machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

from jaxrl.errors import UserError
from jaxrl.rewards.sandbox.bubblewrap import Bubblewrap
from jaxrl.rewards.sandbox.landlock import Landlock
from jaxrl.rewards.sandbox.sandbox_interface import Sandbox, SandboxUnavailable
from jaxrl.rewards.sandbox.unconfined import Unconfined
from jaxrl.rewards.sandbox.webassembly import WebAssembly

SandboxChoice = Literal["auto", "bubblewrap", "webassembly", "landlock", "none"]
"""Values of `reward.code_sandbox`."""

SANDBOXES: dict[str, type[Sandbox]] = {
    kind.name: kind for kind in (Bubblewrap, WebAssembly, Landlock, Unconfined)
}
"""By name, those that `auto` tries first at the front; it never takes `none`."""


def choose_sandbox(choice: str) -> Sandbox:
    """Returns a sandbox that works on this machine.

    Args:
      choice: a name of `SANDBOXES`, or "auto" for the first one that works.

    Raises:
      UserError: the named sandbox does not work, or none does.
    """
    names = [name for name in SANDBOXES if name != "none"] if choice == "auto" else [choice]
    return _first_that_works(choice, [SANDBOXES[name] for name in names])


def _first_that_works(choice: str, kinds: Sequence[type[Sandbox]]) -> Sandbox:
    reasons = []
    for kind in kinds:
        sandbox = kind()
        try:
            sandbox.check()
        except SandboxUnavailable as reason:
            reasons.append(f"{kind.name}: {reason}")
        else:
            return sandbox
    raise UserError(
        "the grader 'code' runs programs that a model wrote, and no sandbox for them works on this machine: "
        f"reward.code_sandbox={choice!r} has tried {'; '.join(reasons)}; install bubblewrap, or set "
        "reward.code_sandbox='none' to run them with the rights of this user"
    )


@functools.cache
def sandbox_called(name: str) -> Sandbox:
    """The sandbox of this process with a name of `SANDBOXES`; it has been checked before."""
    return SANDBOXES[name]()
