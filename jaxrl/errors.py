"""The one exception that commands print without a traceback, and the commonest reason for it."""

from typing import Any


class UserError(ValueError):
    """Something the user can mend. The message gives the value, the rule and the remedy.

    Commands print the message alone and exit with status 2.
    """


def require_at_least(minimum: float, settings: Any, *names: str) -> None:
    """Raises ValueError for the first attribute of `settings` that is below `minimum`.

    For the checks of settings dataclasses; the config door adds the setting's full name.
    """
    for name in names:
        value = getattr(settings, name)
        if value < minimum:
            raise ValueError(f"{name} {value} is below {minimum}; use {minimum} or more")
