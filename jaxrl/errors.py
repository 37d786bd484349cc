"""The one exception that commands print without a traceback, and how commands end."""

EXIT_USER_ERROR = 2
# What sysexits.h has for "try again": the run was stopped, or another process of it was lost.
EXIT_TRY_AGAIN = 75
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """Something the user can fix. The message gives the value, the rule and the remedy.

    Commands print the message alone and exit with status `EXIT_USER_ERROR`.
    """
