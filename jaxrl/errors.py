"""The exception that commands print without a traceback, and their exit statuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

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

    A UserError is printed in one line, with the status `EXIT_USER_ERROR`; that of Ctrl-C is
    `EXIT_INTERRUPTED`. SystemExit and all other exceptions pass through.
    """
    try:
        return command()
    except UserError as error:
        print("error: " + re.sub(r"\s*\n\s*", " ", str(error).strip()), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
