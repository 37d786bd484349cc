"""Errors of requests that are not the sender's fault. Errors of the sender are `UserError`s."""


class ServingError(RuntimeError):
    """The request was not answered."""


class Overloaded(ServingError):
    """Too many samples are waiting; the sender may try again later."""


class Stopped(ServingError):
    """The driver no longer answers requests."""


class NotFinite(ServingError):
    """The model's log-probabilities are not finite: its weights are broken, or overflow on this prompt."""
