"""The one exception that commands print without a traceback."""


class UserError(ValueError):
    """Something the user can fix. The message gives the value, the rule and the remedy.

    Commands print the message alone and exit with status 2.
    """
