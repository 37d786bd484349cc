"""The exception that commands print without a traceback, and their exit statuses."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import posix
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

EXIT_USER_ERROR = 2
# EX_TEMPFAIL ("try again") of sysexits.h: the run was stopped, or another process of the run was lost.
EXIT_TRY_AGAIN = 75
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """An error that the user can fix. The message gives the value, the rule and the remedy.

    `exit_status` prints the message alone.
    """


def exit_status(command: Callable[[], int]) -> int:
    """Calls a command and returns its exit status.

    A UserError, or a path that is too long for the system, is printed in one line, with the status
    `EXIT_USER_ERROR`; that of Ctrl-C is `EXIT_INTERRUPTED`. SystemExit with another status than 0 and all
    other exceptions pass through. What a user's code has left for the end of the process does not make 0 of
    another status.
    """
    global _failed
    # 1 is that of an exception which passes.
    _failed, status = 0, 1
    try:
        with must_return():
            status = command()
    except (UserError, OSError) as error:
        message = str(error).strip()
        if not isinstance(error, UserError):
            if error.errno != errno.ENAMETOOLONG:
                raise
            message = f"the path {error.filename} is too long for a file system; shorten it"
        # Nobody reads a path of 5,000 letters.
        message = re.sub(r"(\S{100})\S{900,}", r"\1...", message)
        print("error: " + re.sub(r"\s*\n\s*", " ", message), file=sys.stderr)
        status = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    finally:
        _failed = status
        # What is registered last runs first.
        atexit.unregister(_keep_status)
        atexit.register(_keep_status)
    return status


_real_exit = os._exit
# The status of the last command; and what was replaced while it ran.
_failed = 0
_replaced: list[tuple[Any, str, Any]] = []


def _keep_status() -> None:
    """If the command has failed, lets nothing end the process with another status."""
    for owner, name, refuses in _replaced if _failed else ():
        setattr(owner, name, refuses)


# What ends this process on the spot, without an exception; C's functions have these names in ctypes.
_ENDS = ("_exit", "execv", "execve")
_C_ENDS = ("_exit", "_Exit", "exit", "quick_exit", "Py_Exit", "execv", "execve", "execvp")


@contextlib.contextmanager
def must_return() -> Iterator[None]:
    """Makes an error of what ends the program in the middle as if all were done.

    The functions that a config names are imported and called in this process. SystemExit with status 0, from
    any of them, becomes a UserError, and so does a call of os._exit, of os.exec* or, by ctypes, of C's `exit`
    and the like. Code of this package, and processes that were forked from this one, still end. So does what
    an extension module ends: only another process could see it, by importing the functions a second time.

    Raises:
      UserError: code has tried to end the program; the message has its file and line.
    """
    process, is_open = os.getpid(), True

    def refusing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def refuse(*args: Any) -> Any:
            if os.getpid() != process or not (is_open or _failed):
                return real(*args)
            # None for the interpreter, at the end of the process or in a thread.
            caller = sys._getframe().f_back
            # os.execvp and the like are Python's own, and call this.
            while caller is not None and caller.f_globals.get("__name__") == "os":
                caller = caller.f_back
            if caller is not None and _is_ours(caller):
                return real(*args)
            if not is_open:
                return _real_exit(_failed)
            place = f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller else "a thread"
            raise UserError(_ended(place, name))

        return refuse

    look_up = ctypes.CDLL.__getitem__

    def look_up_refusing(library: ctypes.CDLL, name: Any) -> Any:
        found = look_up(library, name)
        return refusing(found, f"C's {name}") if name in _C_ENDS else found

    replaced: list[tuple[Any, str, Any]] = [(ctypes.CDLL, "__getitem__", look_up_refusing)]
    for module in (os, posix):
        replaced += [
            (module, name, refusing(getattr(module, name), f"os.{name}")) for name in _ENDS
        ]
    _replaced[:] = replaced
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, refuses in replaced:
        setattr(owner, name, refuses)
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        # Python's parser of arguments ends on behalf of who has called it, for --help.
        frames = [
            (frame, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") != "argparse"
        ]
        frame, line = frames[-1]
        if _is_ours(frame):
            raise
        raise UserError(_ended(f"{frame.f_code.co_filename}:{line}", "SystemExit")) from error
    finally:
        # Somebody may have imported the functions meanwhile.
        is_open = False
        for (owner, name, _), real in zip(replaced, before, strict=True):
            setattr(owner, name, real)


def _is_ours(frame: types.FrameType) -> bool:
    # Of this package and of an extension (jaxrl_NAME).
    return re.match(r"jaxrl(_\w+)?\.", str(frame.f_globals.get("__name__"))) is not None


def _ended(place: str, how: str) -> str:
    return f"{place} has ended the program ({how}); a function that a config names must return"
