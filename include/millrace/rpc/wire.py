"""Wire form between the log server and its clients, apart from Arrow itself.

Requests are JSON objects (tickets, commands, action bodies); values and entries are Arrow record batches. Errors are
sent as their stable code, message and attributes, and are raised as the same class. An acknowledgement is a few dozen
bytes, because the ids of an atomic batch are consecutive in every known backend; other ids are sent in full.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from millrace.base.errors import InvalidArgument, LogError, LogUnavailable, MillraceError
from millrace.message.ids import LogId, LogIds

VALUE_SCHEMA: Final = pa.schema([pa.field("value", pa.large_binary(), nullable=False)])
"""Schema of an append; one record batch is one append."""

TOKEN_VARIABLE: Final = "MILLRACE_SERVER_TOKEN"
"""Environment variable with another token that the server accepts, for clients that cannot read server.json."""
APPEND_ROLE: Final = "append"
"""Name, in requests, of the log server's extension that decides and answers appends."""
TIMEOUT: Final = struct.Struct("<d")
"""Metadata of an append to that extension: the seconds to wait for its outcome."""
DEFAULT_DEADLINE: Final = 30.0
"""Default timeout of a call, in seconds."""
AUTHORIZATION: Final = "authorization"
MAX_ERROR_TEXT: Final = 1000
"""Maximum length of an error's message on the wire: gRPC sends errors in headers, which are bounded."""

_LARGEST: Final = (1 << 63) - 1
_CONSECUTIVE: Final = 0
_LISTED: Final = 1
_FAILED: Final = 2
_NOT_TAKEN: Final = 3
_ACK: Final = struct.Struct("<BQqq")


class NotAccepted(Exception):
    """The server is stopping and accepted nothing of this append, which can safely be sent again."""


def is_valid_batch(batch: pa.RecordBatch) -> bool:
    """Return whether a batch from the wire has the data that its lengths and offsets claim.

    Flight does not check this. Nothing of a batch may be read before, not even its size.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def to_json(document: object) -> bytes:
    """Encode one JSON document, compactly."""
    return json.dumps(document, separators=(",", ":")).encode()


def from_json(data: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises InvalidArgument for anything else."""
    try:
        document = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise InvalidArgument("the request is not JSON") from None
    if not isinstance(document, dict):
        raise InvalidArgument("the request is not a JSON object")
    return document


def request_of(data: bytes) -> dict[str, Any]:
    """Decode a request. Raises InvalidArgument if it is no JSON object, or has a text that no UTF-8 stands for."""
    request = from_json(data)
    if b"\\ud" in data or b"\\uD" in data:  # halves of characters, which a name in a file or a store cannot have
        try:
            json.dumps(request, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidArgument("a text of the request cannot be written as UTF-8") from None
    return request


def request_number(request: dict[str, Any], key: str, default: float) -> float:
    """Return a number of a request, at least 0. Raises InvalidArgument."""
    value = request.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise InvalidArgument(f"{key!r} of the request is a number, 0 or more")
    return value


def log_id(value: object) -> LogId:
    """Parse a position from JSON: `[ledger, entry]`."""
    match value:
        case [int(ledger), int(entry)] if all(-_LARGEST <= part <= _LARGEST for part in (ledger, entry)):
            return LogId(ledger, entry)
        case _:
            raise InvalidArgument(f"{value!r} is not a position: write it as [ledger, entry]")


def optional_log_id(value: object) -> LogId | None:
    """Parse a position like :func:`log_id`, or null as None."""
    return None if value is None else log_id(value)


# --- errors -----------------------------------------------------------------------------------------------------------


def _classes(root: type[MillraceError] = MillraceError) -> Iterator[type[MillraceError]]:
    yield root
    for child in root.__subclasses__():
        yield from _classes(child)


def error_to_bytes(error: BaseException) -> bytes:
    """Encode an error. One outside our family is an internal failure with unknown effect: LogUnavailable."""
    if not isinstance(error, MillraceError):
        error = LogUnavailable(
            f"the log server failed inside ({type(error).__name__}: {error}); its log file has the trace"
        )
    text = str(error)[:MAX_ERROR_TEXT]
    return json.dumps({"code": error.code, "message": text, "attributes": vars(error)}, default=str).encode()


def error_from_bytes(data: bytes) -> MillraceError:
    """Decode the result of :func:`error_to_bytes`; a code unknown to this build becomes a LogError with its text."""
    try:
        document = json.loads(data)
        code, message, attributes = document["code"], document["message"], document["attributes"]
    except (ValueError, KeyError, TypeError):
        return LogUnavailable(f"the log server answered with an error that cannot be read: {data[:200]!r}")
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in attributes.items()}
    for kind in _classes():
        if kind.code == code:
            try:
                return kind(message, **options)
            except TypeError:
                break  # same code, other attributes: a server of another version
    return LogError(f"{code}: {message}")


def flight_error(error: BaseException) -> flight.FlightError:
    """Return the error that a Flight method raises, from which the client restores the original."""
    return flight.FlightServerError(str(error)[:MAX_ERROR_TEXT], error_to_bytes(error))


def typed_error(error: BaseException) -> MillraceError | None:
    """Return the original of :func:`flight_error`, or None if the call was lost."""
    data = getattr(error, "extra_info", b"")
    return error_from_bytes(data) if data else None


# --- acknowledgements -------------------------------------------------------------------------------------------------


def ack_to_bytes(ids: Sequence[LogId]) -> bytes:
    """Encode an append's ids, which strictly increase."""
    if not ids:
        return _ACK.pack(_CONSECUTIVE, 0, 0, 0)
    first, last = ids[0], ids[-1]
    if first.ledger == last.ledger and last.entry - first.entry == len(ids) - 1:
        return _ACK.pack(_CONSECUTIVE, len(ids), first.ledger, first.entry)
    flat = [part for each in ids for part in each]
    return _ACK.pack(_LISTED, len(ids), 0, 0) + struct.pack(f"<{len(flat)}q", *flat)


def failure_to_bytes(error: BaseException) -> bytes:
    """Encode an append's failure in place of its ids."""
    if isinstance(error, NotAccepted):
        return _ACK.pack(_NOT_TAKEN, 0, 0, 0)
    return _ACK.pack(_FAILED, 0, 0, 0) + error_to_bytes(error)


def ack_from_bytes(data: bytes) -> Sequence[LogId]:
    """Decode the ids of an acknowledgement. Raises what the append raised, or NotAccepted."""
    status, count, ledger, entry = _ACK.unpack_from(data)
    if status == _CONSECUTIVE:
        return LogIds(ledger, range(entry, entry + count))
    if status == _LISTED:
        flat = struct.unpack_from(f"<{2 * count}q", data, _ACK.size)
        return [LogId(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
    if status == _NOT_TAKEN:
        raise NotAccepted
    raise error_from_bytes(data[_ACK.size :])


@dataclass(frozen=True, slots=True)
class ClockView:
    """The state of a stamping clock, in Unix milliseconds."""

    wall_ms: int
    stamp_ms: int
    held_since_ms: int | None
    """The stamp at which an unaccepted leap of the wall clock began; None if the wall clock is accepted."""
    leap_seconds: float

    @property
    def ahead_seconds(self) -> float:
        """Time by which stamps are ahead of the wall clock; negative while a leap of it is not accepted."""
        return (self.stamp_ms - self.wall_ms) / 1000
