"""The one exception that commands print without a traceback."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """Something the user can fix. The message gives the value, the rule and the remedy.

    Commands print the message alone and exit with status `EXIT_USER_ERROR`.
    """
