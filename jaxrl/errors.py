"""The exception that commands print without a traceback, and their exit statuses."""

EXIT_USER_ERROR = 2
# EX_TEMPFAIL ("try again") of sysexits.h: the run was stopped, or another process of the run was lost.
EXIT_TRY_AGAIN = 75
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """An error that the user can fix. The message gives the value, the rule and the remedy.

    Commands print the message alone and exit with status `EXIT_USER_ERROR`.
    """
