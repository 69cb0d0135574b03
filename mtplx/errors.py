"""Every error MTPLX raises on purpose.

    MtplxError
    |-- ConfigError               a setting cannot be used; raised before anything starts
    |-- ModelLoadError            a model cannot be had or cannot be read
    |-- RequestError              the request, not the server, is at fault
    |   |-- InvalidRequestError       a field is wrong or makes no sense
    |   |   |-- UnsupportedFieldError     the field is known, and not supported
    |   |   |-- ContextLengthError        prompt longer than the model reads
    |   |   `-- KVBudgetError             its KV cache does not fit the memory budget
    |   |-- RequestTooLargeError      the body is larger than the server accepts
    |   |-- AuthenticationError       no key was sent, or one that is not known
    |   |-- OriginRefusedError        a web page that may not call this server
    |   |-- ResponseNotFoundError     no such response is kept, or it is somebody else's
    |   `-- ModelNotFoundError        the named model is not served here
    |-- QueueFullError            too many requests wait; try again later
    |-- EngineUnavailableError    the engine stopped or is stopping
    |-- DeadlineExceededError     the request was not done when its client wanted it
    `-- GenerationError           one request failed while it ran; the others go on

Every message is one or two sentences for the user: what is wrong, and what to do
instead. ``server/errors.py`` holds the one table from these classes to HTTP.
"""

from __future__ import annotations


class MtplxError(Exception):
    """Base of every error MTPLX raises on purpose."""


class ConfigError(MtplxError):
    """A setting has a value that cannot be used."""


class ModelLoadError(MtplxError):
    """A model cannot be fetched, found or read."""


class RequestError(MtplxError):
    """The request is at fault.

    Args:
        message: What is wrong and what to send instead.
        param: Path of the offending field in the body, or None.
        code: Machine-readable word for the case, or None.
    """

    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(RequestError):
    """A field is missing, has the wrong type, or a value outside its range."""

    code = "invalid_value"


class UnsupportedFieldError(InvalidRequestError):
    """The field exists in the API and this server does not support it."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"


class KVBudgetError(InvalidRequestError):
    """The KV cache of the request does not fit the memory budget."""

    code = "kv_budget_exceeded"


class RequestTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    code = "request_too_large"


class AuthenticationError(RequestError):
    """The request has no API key, or one that the server does not know."""

    code = "invalid_api_key"


class OriginRefusedError(RequestError):
    """The request comes from a web page that may not call this server."""

    code = "origin_refused"


class ResponseNotFoundError(RequestError):
    """No response, or item of one, of this name is kept for the client."""

    code = "response_not_found"


class ModelNotFoundError(RequestError):
    """The named model is not served here."""

    code = "model_not_found"


class QueueFullError(MtplxError):
    """The queue is full. ``retry_after_s`` says when to try again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(MtplxError):
    """The engine has stopped, or is stopping."""


class DeadlineExceededError(MtplxError):
    """The request was not complete at its deadline."""


class GenerationError(MtplxError):
    """One request failed while it ran."""
