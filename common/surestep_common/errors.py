"""The one tree of errors and the one table from error to gRPC code to HTTP status.

SurestepError
├── InvalidRequest       the request itself is wrong; `param` names the field
│   ├── ContextOverflow       prompt and output do not fit into the model's context
│   ├── MissingParameter      a field that must be there is not
│   ├── PreviousNotFound      no stored response to go on from
│   ├── UnsupportedParameter  a field, or a value of one, whose effect is not implemented
│   └── UnsupportedMediaType  a body that is not declared to be JSON
├── RequestTooLarge      body or prompt over a stated limit
├── Unauthenticated      missing or wrong API key
├── PermissionDenied     the caller may not do this; `param` names the field, if it is one
├── NotFound             no such thing
│   └── ModelNotFound         no such model
├── QueueFull            try later; `retry_after` seconds
├── Unavailable          not ready, draining, or no worker; `retry_after` seconds
│   ├── ModelNotLoaded   the model that was asked for cannot be loaded for now
│   └── ConnectionLost   the peer went away without an answer
├── ModelChanged         another model is served than the one that the request was begun with
├── DeadlineExceeded     a deadline of the request passed
│   └── ClientTooSlow    the client did not send in time what it had begun to send
├── ModelFault           this request cannot be computed: unusable logits, or it ends what tries
├── Cancelled            the client went away
├── Unimplemented        a method of a foreign interface that is not served
└── InternalError        our own fault; the message shown outside is generic

Services raise these; `surestep_common.rpc` turns them into gRPC statuses and back, and the gateway
turns them into OpenAI error bodies.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from grpc import StatusCode

MAX_MESSAGE_CHARS = 1000  # of a message: a client may find its own text in one
MAX_PARAM_CHARS = 500  # of the name of a field: keys of a body are parts of some


def shortened(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """Return a text cut to so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class SurestepError(Exception):
    """Base of every error that may cross a process border."""

    rank: int | None = None  # of the worker that reported it, if one did

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        self.message = shortened(message)
        super().__init__(self.message)
        self.param = None if param is None else shortened(param, MAX_PARAM_CHARS)
        self.retry_after = retry_after


class InvalidRequest(SurestepError):
    """The request is wrong and will be wrong again."""


class ContextOverflow(InvalidRequest):
    """Prompt and output do not fit into the model's context."""


class MissingParameter(InvalidRequest):
    """A field that must be there is not."""


class PreviousNotFound(InvalidRequest):
    """No stored response to go on from; clients send the conversation again."""


class UnsupportedParameter(InvalidRequest):
    """A field, or a value of one, whose effect is not implemented."""


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared to be JSON."""


class RequestTooLarge(SurestepError):
    """Over a limit on size."""


class Unauthenticated(SurestepError):
    """No valid API key."""


class PermissionDenied(SurestepError):
    """The caller is known, and may not do this."""


class NotFound(SurestepError):
    """The named thing does not exist here."""


class ModelNotFound(NotFound):
    """No such model here."""


class QueueFull(SurestepError):
    """The waiting queue is at its bound."""


class Unavailable(SurestepError):
    """Cannot serve right now."""


class ModelNotLoaded(Unavailable):
    """Loading the model has failed, and is tried again later."""


class ConnectionLost(Unavailable):
    """The peer went away without an answer; what it had accepted may be submitted again."""


class ModelChanged(SurestepError):
    """Going on would change the voice in the middle; sent again, the request is a new one."""


class DeadlineExceeded(SurestepError):
    """A deadline of the request passed."""


class ClientTooSlow(DeadlineExceeded):
    """The client did not send in time what it had begun to send."""


class ModelFault(SurestepError):
    """The model has no usable logits for this request, or whatever computes it ends."""


class DrafterFault(SurestepError):
    """Ranks that draft together lost step with each other: the epoch is over."""


class Cancelled(SurestepError):
    """The caller cancelled."""


class Unimplemented(SurestepError):
    """The interface has this method, and this server does not serve it."""


class InternalError(SurestepError):
    """A bug of ours."""


class ErrorKind(NamedTuple):
    """The looks of one error class on each interface."""

    error: type[SurestepError]
    code: StatusCode
    http_status: int
    openai_type: str
    openai_code: str  # OpenAI's own where it has one: clients decide by it what to do


_BAD, _BAD_400 = StatusCode.INVALID_ARGUMENT, (400, "invalid_request_error")

# Kinds may share a gRPC code: the first one with a code is what the code means on the way back.
ERROR_TABLE: tuple[ErrorKind, ...] = (
    ErrorKind(InvalidRequest, _BAD, *_BAD_400, "invalid_value"),
    ErrorKind(ContextOverflow, _BAD, *_BAD_400, "context_length_exceeded"),
    ErrorKind(MissingParameter, _BAD, *_BAD_400, "missing_required_parameter"),
    ErrorKind(PreviousNotFound, _BAD, *_BAD_400, "previous_response_not_found"),
    ErrorKind(UnsupportedParameter, _BAD, *_BAD_400, "unsupported_parameter"),
    ErrorKind(UnsupportedMediaType, _BAD, 415, "invalid_request_error", "unsupported_media_type"),
    ErrorKind(
        RequestTooLarge,
        StatusCode.OUT_OF_RANGE,
        413,
        "invalid_request_error",
        "request_too_large",
    ),
    ErrorKind(
        Unauthenticated,
        StatusCode.UNAUTHENTICATED,
        401,
        "authentication_error",
        "invalid_api_key",
    ),
    ErrorKind(
        PermissionDenied,
        StatusCode.PERMISSION_DENIED,
        403,
        "permission_error",
        "permission_denied",
    ),
    ErrorKind(NotFound, StatusCode.NOT_FOUND, 404, "not_found_error", "not_found"),
    ErrorKind(ModelNotFound, StatusCode.NOT_FOUND, 404, "not_found_error", "model_not_found"),
    ErrorKind(
        QueueFull,
        StatusCode.RESOURCE_EXHAUSTED,
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    ),
    ErrorKind(
        Unavailable,
        StatusCode.UNAVAILABLE,
        503,
        "service_unavailable_error",
        "service_unavailable",
    ),
    ErrorKind(
        ModelNotLoaded,
        StatusCode.UNAVAILABLE,
        503,
        "service_unavailable_error",
        "model_not_loaded",
    ),
    ErrorKind(
        ModelChanged,
        StatusCode.FAILED_PRECONDITION,
        503,
        "model_changed_error",
        "model_changed",
    ),
    ErrorKind(DeadlineExceeded, StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error", "timeout"),
    ErrorKind(ClientTooSlow, StatusCode.DEADLINE_EXCEEDED, 408, "timeout_error", "timeout"),
    ErrorKind(ModelFault, StatusCode.DATA_LOSS, 500, "model_error", "server_error"),
    ErrorKind(DrafterFault, StatusCode.ABORTED, 500, "internal_error", "server_error"),
    ErrorKind(Cancelled, StatusCode.CANCELLED, 499, "cancelled_error", "cancelled"),
    ErrorKind(
        Unimplemented,
        StatusCode.UNIMPLEMENTED,
        501,
        "not_implemented_error",
        "not_implemented",
    ),
    ErrorKind(InternalError, StatusCode.INTERNAL, 500, "internal_error", "server_error"),
)

_BY_ERROR = {kind.error: kind for kind in ERROR_TABLE}
_BY_CODE = {kind.code: kind for kind in reversed(ERROR_TABLE)}
_INTERNAL = _BY_ERROR[InternalError]

_LACKS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EAGAIN)
INTERNAL_MESSAGE = "Internal error; the server's log has the details."


def lack_of(error: BaseException) -> Unavailable | None:
    """Return what the machine lacks for a while, as clients are told it; None for other errors."""
    if isinstance(error, MemoryError):
        return Unavailable("the server is out of memory")
    if isinstance(error, OSError) and error.errno in _LACKS:
        return Unavailable(f"the server is out of resources: {error.strerror}")
    return None


def kind_of(error: BaseException) -> ErrorKind:
    """Return the table's row for an exception; anything unknown is an InternalError."""
    for cls in type(error).__mro__:
        if cls in _BY_ERROR:
            return _BY_ERROR[cls]
    return _INTERNAL


def kind_of_code(code: StatusCode) -> ErrorKind:
    """Return the table's row for a gRPC status code; anything unknown is an InternalError."""
    return _BY_CODE.get(code, _INTERNAL)
