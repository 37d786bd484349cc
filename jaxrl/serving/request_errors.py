"""Reasons why a request was not answered that its sender cannot help; for the others there is `UserError`."""


class ServingError(RuntimeError):
    """The request was not answered."""


class Overloaded(ServingError):
    """Too many samples wait already; the sender may try again later."""


class Stopped(ServingError):
    """The driver answers no more requests."""


class NotFinite(ServingError):
    """The model's log-probabilities are not finite: its weights are broken, or break on this prompt."""
