"""Every route and status code of the HTTP planes, for both sides: what one offers is what the other asks for.

A control request is `POST /v1/control/<message name>` with a wire.Envelope as signed body. An answer that is not 200 or
204 carries a wire.ErrorBody, whose `code` becomes the same exception on the other side.
"""

from typing import get_args

from subnet import wire
from subnet.adapters.auth import AUTH_CODES
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused, StrataError, TransientFailure

CONTROL = "/v1/control/"
PUBLIC = "/v1/public/"
FRAMES = "/v1/frames/"
BLOBS = "/v1/blobs/"
REACH = "/v1/reach/"
HEALTH = "/health"
METRICS = "/metrics"

PROTOCOL_HEADER = "X-Strata-Protocol"
MESSAGES: frozenset[str] = frozenset(kind.__name__ for kind in get_args(wire.Request))
"""Names of the control routes: exactly the kinds of wire.Request."""

FORBIDDEN_CODES = frozenset({"banned", "permit", "role", "roster", "bad_grant", "grant_expired"})
"""Refusals that depend on who asks rather than on what: HTTP 403, all other refusals 409."""

Answerable = ProtocolViolation | Refused | NotFound | TransientFailure
"""What a handler may raise to answer the peer; anything else ends the process."""
ANSWERABLE = (ProtocolViolation, Refused, NotFound, TransientFailure)

_PROTOCOL_VIOLATION, _NOT_FOUND, _BUSY, _UNAVAILABLE = "protocol_violation", "not_found", "busy", "unavailable"


def control_path(request: wire.Request) -> str:
    """Route of one request."""
    return CONTROL + type(request).__name__


def status_and_body(error: Answerable) -> tuple[int, wire.ErrorBody]:
    """How `error` is told to a peer."""
    match error:
        case Refused():
            status = 401 if error.code in AUTH_CODES else 403 if error.code in FORBIDDEN_CODES else 409
            return status, wire.ErrorBody(code=error.code, reason=error.reason)
        case ProtocolViolation():
            return 400, wire.ErrorBody(code=_PROTOCOL_VIOLATION, reason=str(error))
        case NotFound():
            return 404, wire.ErrorBody(code=_NOT_FOUND, reason=str(error))
        case Backpressure():
            return 429, wire.ErrorBody(code=_BUSY, reason=str(error))
        case TransientFailure():
            return 503, wire.ErrorBody(code=_UNAVAILABLE, reason=str(error))


def error_of(status: int, body: bytes) -> StrataError:
    """The exception that an answer stands for; an answer without a readable body (a proxy's page) goes by its status."""
    try:
        answer = wire.decode(wire.ErrorBody, body)
    except ProtocolViolation:
        answer = wire.ErrorBody(code=f"http_{status}", reason=f"HTTP status {status} without an explanation")
    if status == 429:
        return Backpressure(answer.reason)
    if status >= 500 or status == 408:
        return TransientFailure(answer.reason)
    if status == 400:
        return ProtocolViolation(answer.reason)
    if status == 404 and answer.code == _NOT_FOUND:
        return NotFound(answer.reason)
    return Refused(answer.code, answer.reason)
