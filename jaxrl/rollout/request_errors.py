"""Why a request was not answered, where its sender is not to blame; `UserError` is for where they are."""


class ServingError(RuntimeError):
    """A request was not answered and its sender is not to blame."""


class Overloaded(ServingError):
    """Too much is waiting already; come again later."""


class Stopped(ServingError):
    """The driver answers nothing any more."""


class NotFinite(ServingError):
    """The model has given no probabilities: its weights, or what they make of this prompt, are broken."""
