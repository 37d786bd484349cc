"""Locks down the current process by resource limits, Landlock and a seccomp filter.

It is used in two ways. The native sandboxes pass the text of this file to a new Python; its `main` locks
itself down and then runs the program. So the file imports only the standard library. `run_forked` uses it for
processes that already have their functions in memory.

Landlock decides about files, seccomp about system calls; see "Landlock: unprivileged access control" in
https://docs.kernel.org/userspace-api/landlock.html.
"""

import base64
import ctypes
import json
import os
import resource
import signal
import stat
import struct
import sys
import types

# Landlock's system calls have these numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2

LANDLOCK_FILES = 3
"""The first version of Landlock that covers every change of a file's content: truncation came with it."""

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 if the kernel has none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION))


def limit_resources(seconds: int, memory_bytes: int) -> None:
    """Limits this process: processor time, address space, no file output, no core, 64 descriptors."""
    # Python ignores these two; ended by them, a program cannot go on by catching an exception.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    # A soft limit could be raised again, so both are set; a hard one that is lower stays.
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def restrict(readable: list[str], syscall_filter: bytes, *, landlock: bool) -> None:
    """Restricts this process permanently.

    Args:
      readable: files and folders that it may still read, if `landlock`.
      syscall_filter: compiled seccomp filter; empty for none.
      landlock: whether to drop every right that this kernel's Landlock knows, except reading `readable`.

    Raises:
      OSError: the kernel refuses.
    """
    # Without this the kernel refuses filters of a user who is not root.
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if landlock:
        files, network, scopes = _known_rights()
        rules = _ruleset(files, network, scopes)
        _checked(rules)
        try:
            for path in readable:
                _allow(rules, path, files & (_READ_FILE | _READ_DIR))
            _allow(rules, "/dev/null", files & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
            _checked(_libc.syscall(_RESTRICT_SELF, rules, 0))
        finally:
            os.close(rules)
    if syscall_filter:
        # struct sock_fprog: the number of instructions of 8 bytes, and where they are.
        content = ctypes.create_string_buffer(syscall_filter, len(syscall_filter))
        program = struct.pack("@HP", len(syscall_filter) // 8, ctypes.addressof(content))
        _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0))


def _known_rights() -> tuple[int, int, int]:
    """Every right of files, of the network, and every scope that the kernel knows, newer ones included."""

    def known(position: int) -> int:
        found = 0
        # Asking is the only way: the kernel names its version, not its rights.
        for bit in range(63):
            handled = [0, 0, 0]
            handled[position] = 1 << bit
            rules = _ruleset(*handled)
            if rules >= 0:
                os.close(rules)
                found |= 1 << bit
        return found

    return known(0), known(1), known(2)


def _ruleset(files: int, network: int, scopes: int) -> int:
    # Older kernels take a longer struct if what they do not know is 0.
    handled = struct.pack("QQQ", files, network, scopes)
    return _libc.syscall(_CREATE_RULESET, handled, len(handled), 0)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= ~_READ_DIR
        rule = struct.pack("=Qi", rights, place)
        _checked(_libc.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(place)


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    """Locks this process down and runs the program that its caller gives as `__main__`."""
    options = json.loads(sys.argv[1])
    if options["parent"]:
        # The parent may be killed. This process must not survive it: its limit of time goes with it.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != options["parent"]:
            os._exit(1)
    with open(options["source"], encoding="utf-8") as file:
        program = file.read()
    # What the parent had open is not the program's.
    os.closerange(3, 4096)
    limit_resources(options["seconds"], options["memory_bytes"])
    restrict(
        options["readable"],
        base64.b64decode(options["syscall_filter"]),
        landlock=options["landlock"],
    )
    sys.argv[:] = ["program.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    exec(compile(program, "program.py", "exec"), module.__dict__)
