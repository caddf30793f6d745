"""Access to values at paths of a document: read, set, remove. Paths lead through objects only; a list is a value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from millrace.flows.declare.paths import joined

Document: TypeAlias = dict[str, Any]
MISSING: Final = object()


class Digits(float):
    """A number with more digits than a float has. It computes as a float, and is written with its original digits."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Digits:
        made = super().__new__(cls, text)
        made.text = text
        return made

    def __reduce__(self) -> tuple[type[Digits], tuple[str]]:
        return Digits, (self.text,)


_DIGITS: Final = re.compile(rb"[0-9][0-9.]{16}")
_ARE_DIGITS: Final = bytes(ord("0") if each in b"0123456789." else ord(" ") for each in range(256))
_LONG: Final = b"0" * 17


def _number(text: str) -> float:
    found = float(text)
    return found if len(text) < 17 or repr(found) == text else Digits(text)


_decode: Final = msgspec.json.Decoder().decode
_decode_exactly: Final = msgspec.json.Decoder(float_hook=_number).decode
"""A decoder that retains all digits. Its hook costs more than the rest of the decoding, so use it only if needed."""


JSON_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of bytes that are no JSON, have a number that no float holds, or nest too deep."""


def decoded(value: bytes, *, exact: bool = True) -> Any:
    """Decode JSON, if `exact` with all digits of its numbers, else with floats. Raises one of JSON_ERRORS."""
    return _decode_exactly(value) if exact and _may_have_digits(value) else _decode(value)


def _may_have_digits(value: bytes) -> bool:
    # Searching for one text costs a tenth of matching the pattern.
    return _LONG in value.translate(_ARE_DIGITS) and _DIGITS.search(value) is not None


def _written(value: Any) -> Any:
    if isinstance(value, Digits):
        return msgspec.Raw(value.text.encode())
    # msgspec's contract for a type that the hook does not handle.
    raise NotImplementedError(f"a value of type {type(value).__name__} is not JSON")


encoded: Final = msgspec.json.Encoder(enc_hook=_written).encode
"""Encode a document as JSON on one line. NaN becomes null."""


def plain(document: Document) -> Document:
    """Return a copy whose numbers are plain floats, for libraries that accept no other type."""
    found: Document = _decode(encoded(document))
    return found


class Refused(Exception):
    """A step cannot process this document. `kind` is a stable name of the cause."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def getter(path: tuple[str, ...]) -> Callable[[Document], Any]:
    """Return a function that returns the value at `path`, or MISSING."""
    if len(path) == 1:
        (name,) = path
        return lambda document: document.get(name, MISSING)
    *folders, last = path

    def get(document: Document) -> Any:
        for folder in folders:
            document = document.get(folder, MISSING)
            if type(document) is not dict:
                return MISSING
        return document.get(last, MISSING)

    return get


def taker(path: tuple[str, ...]) -> Callable[[Document], Any]:
    """Return a function that removes and returns the value at `path`, or returns MISSING."""
    if len(path) == 1:
        (name,) = path
        return lambda document: document.pop(name, MISSING)
    folder, last = getter(path[:-1]), path[-1]

    def take(document: Document) -> Any:
        inner = folder(document)
        return inner.pop(last, MISSING) if type(inner) is dict else MISSING

    return take


def setter(path: tuple[str, ...]) -> Callable[[Document, Any], None]:
    """Return a function that sets the value at `path`, creating objects on the way.

    It raises Refused if a value on the way is not an object.
    """
    *folders, last = path
    if not folders:

        def put(document: Document, value: Any) -> None:
            document[last] = value

        return put

    def put_inside(document: Document, value: Any) -> None:
        for folder in folders:
            inner = document.get(folder, MISSING)
            if type(inner) is not dict:
                if inner is not MISSING and inner is not None:
                    raise Refused(
                        "NO_OBJECT", f"{joined(path)}: {folder!r} holds a {type(inner).__name__}, not an object"
                    )
                inner = document[folder] = {}
            document = inner
        document[last] = value

    return put_inside
