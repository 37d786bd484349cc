"""Runs a program, and ends it with all that it has started when its own standard input is closed.

    python guard.py PROGRAM ARGUMENT ...       its status is the program's, 127 if that is not found

Whoever started the guard may be killed without a word: the system closes the pipe then. It imports nothing of
jaxrl, so that it starts in some 20 ms.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

# Seconds between SIGTERM and SIGKILL: `docker run` passes the first on to its container.
_GRACE_S = 5.0


def main(command: list[str]) -> int:
    """Returns the program's status; ends by the same signal if that is what ended the program."""
    try:
        # Its own group, so that what it starts can be ended with it.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(error)
        return 127
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    status = child.wait()
    _end_group(child)
    if status < 0:
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _end_with_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
