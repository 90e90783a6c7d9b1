"""The hierarchy of errors that Tidegate raises on purpose.

    TidegateError
    ├── ConfigError     what the user asked for can't be run here: one sentence, exit code 2
    │   └── ModelError  the model can't be found, read, or is of a kind not supported
    ├── RequestError    one request is bad; nothing else is disturbed (HTTP 400)
    ├── Overloaded      the queue is full, or too long for the SLO; try again later (HTTP 429)
    └── EngineDead      the engine process is gone; the server can't go on (HTTP 500)

An ``assert`` guards against our own bugs only.
"""


class TidegateError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(TidegateError):
    """The configuration can't work on this machine; the message says what to change."""


class ModelError(ConfigError):
    """The model can't be found or read, or its architecture is not supported."""


class RequestError(TidegateError):
    """A request that can't be served as asked; the message says what to do."""


class Overloaded(TidegateError):
    """The waiting queue is full, or so long that the request would miss its SLO.

    ``retry_after_s`` is the number of seconds after which a retry is sensible.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(TidegateError):
    """The process that runs the core has ended."""
