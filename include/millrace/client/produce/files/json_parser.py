"""JSON objects from text: one per line, or the elements of an array one by one.

It uses Python's parser, because Arrow's (26.0) crashes the process on a line that is just ``null``. It reports what
Python's parser accepts silently: a repeated name in an object (the last value wins) and a number beyond all floats
(infinity). It keeps the digits of a number beyond those of a float (:class:`LongNumber`).
"""

from __future__ import annotations

import codecs
import json
import math
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from millrace.base.errors import InvalidArgument

MAX_OBJECT_CHARACTERS: Final = 64 << 20
_CHUNK: Final = 1 << 20
_SHORT: Final = 16
"""Maximum characters of a number with a decimal point that cannot have more digits than a float keeps."""


class LongNumber(float):
    """A number with a decimal point that may have more digits than a float; `text` has them all."""

    text: str


class JsonObjectParser:
    """A parser. Without `show_values`, errors contain nothing of the input."""

    def __init__(self, *, quote: bool = True) -> None:
        self._quote = quote
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_float=self._number)
        self._fault: str | None = None

    def parse_line(self, line: str) -> dict[str, Any]:
        """Parse one line's object. Raises ValueError with a readable message."""
        self._fault = None
        try:
            return self._sound(self._decoder.decode(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON at character {error.pos + 1}: {error.msg}") from None
        except RecursionError:
            raise ValueError("it nests too deeply") from None

    def parse_array(self, source: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
        """Yield (line, object) for each element of the array in `source`, or (line, error) for a bad one.

        Raises InvalidArgument.
        """
        decode = codecs.getincrementaldecoder("utf-8-sig")()
        held, at, line, ended, previous = "", 0, 1, False, ""  # behind: the mark, or "value", that was last

        def wrong(why: str) -> InvalidArgument:
            return InvalidArgument(f"line {line}: {why}")

        def more(size: int = _CHUNK) -> None:
            nonlocal held, at, ended
            try:
                read = source.read(size)
            except (EOFError, OSError, zlib.error) as error:
                raise wrong(f"the file does not read on, it is damaged or was cut off ({error})") from None
            ended = not read
            try:
                held, at = held[at:] + decode.decode(read, ended), 0
            except UnicodeDecodeError:
                raise wrong("the file is not UTF-8") from None

        while True:
            while at < len(held) and held[at] in " \t\r\n":
                line, at = line + (held[at] == "\n"), at + 1
            if at == len(held):
                if ended and previous == "]":
                    return
                if ended:
                    raise wrong("the array has no end: the file was cut off")
                more()
            elif previous == "]":
                raise wrong("there is text after the array's end")
            elif not previous or (held[at] == "]" and previous != ",") or (held[at] == "," and previous == "value"):
                previous, at = held[at], at + 1  # the first is the bracket of the array
            elif previous == "value":
                raise wrong("a comma, or the array's end, is expected")
            else:
                try:
                    value, end = self._next(held, at)
                except json.JSONDecodeError as error:
                    if ended or len(held) - at > MAX_OBJECT_CHARACTERS:
                        raise wrong(f"it is not JSON {error.pos - at + 1} characters on: {error.msg}") from None
                    more(max(_CHUNK, len(held) - at))
                    continue
                except RecursionError:
                    raise wrong("it nests too deeply") from None
                if end == len(held) and not ended:
                    more()  # a number may continue in the next chunk
                    continue
                yield line, value
                line, at, previous = line + held.count("\n", at, end), end, "value"

    def _next(self, text: str, at: int) -> tuple[dict[str, Any] | ValueError, int]:
        """Return the object that starts at `at`, or an error, and where it ends. Raises the errors of json."""
        self._fault = None
        value, end = self._decoder.raw_decode(text, at)
        try:
            return self._sound(value), end
        except ValueError as error:
            return error, end

    def _sound(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"it is {type(value).__name__}, not an object")
        if self._fault is not None:
            raise ValueError(self._fault)
        return value

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in found if names.count(name) > 1)
            self._fault = f"{f'the name {twice!r:.60}' if self._quote else 'a name'} appears twice in an object"
        return found

    def _number(self, text: str) -> float:
        if len(text) <= _SHORT:
            value = float(text)
        else:
            value = LongNumber(text)
            value.text = text
        if math.isinf(value):
            self._fault = f"{f'the number {text:.40}' if self._quote else 'a number'} is greater than a float holds"
        return value


def begins_array(source: BinaryIO) -> bool:
    """Return whether the first character after white space and a byte-order mark is a bracket. Consumes nothing."""
    peek = getattr(source, "peek", None)
    start: bytes = b"" if peek is None else peek(4096)
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
