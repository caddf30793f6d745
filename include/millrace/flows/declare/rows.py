"""Parts of a declaration for rows: event time, start positions, functions, and tables to join with.

Only flows on Spark have rows, so documents have none of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from millrace.base.errors import InvalidArgument, InvalidStream
from millrace.flows.declare.part import Part
from millrace.message.ids import resolve_tick
from millrace.streams.operators.declared import duration

_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_DELAY: Final = r"^\d+ (second|minute|hour|day)s?$"


def _function(value: object) -> object:
    """Return a function as the name by which another process imports it. Raises ValueError."""
    if callable(value):
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        value = f"{module}:{name}"
    if value is not None and not (isinstance(value, str) and _FUNCTION.fullmatch(value)):
        raise ValueError(
            f"{value!r} is not a module:function that another process can import: define it at a module's top level"
        )
    return value


def _moment(value: object) -> object:
    if value is None or value == "now":
        return value
    try:
        resolve_tick(value)  # type: ignore[arg-type] # checked there
    except InvalidArgument as error:
        raise ValueError(str(error)) from None
    return value


Function = Annotated[Any, BeforeValidator(_function)]
"""A function, or its name ``module:function``; stored as its name."""
Place = Annotated[str | int | None, BeforeValidator(_moment)]
"""A tick, a moment in ISO 8601, or "now"."""
TopicStart = Annotated[str | int, BeforeValidator(lambda each: each if each == "earliest" else _moment(each))]
"""The start position in topics: "earliest", "now", or a moment."""


class Watermark(Part):
    """The column with the event time, and how late a row may be and still count."""

    column: str
    """A column of the rows; or ``_log_time`` of a collection's rows (when a row became visible, by its time tick), or
    ``_record_time`` of a topic's records (the record's timestamp)."""
    delay: str = Field(default="0 seconds", pattern=_DELAY)
    max_ahead: str | None = Field(default=None, pattern=_DELAY)
    """How far an event time may be ahead of its log time; an operator puts later rows aside. Default: no bound."""

    @property
    def ahead(self) -> timedelta | None:
        return None if self.max_ahead is None else duration(self.max_ahead)


class Table(Part):
    """A collection as a table to join with: its rows at one moment, for the whole run."""

    collection: str
    columns: tuple[str, ...] = ()
    at: Place = None
    """A tick, a moment, or "now" (the default): each start of the query."""


def function_of(name: str) -> Callable[..., Any]:
    """Import and return the function ``module:function``. Raises InvalidStream if that fails."""
    import importlib

    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidStream(f"the function {name} cannot be imported: {error}; is its module on PYTHONPATH?") from error
    if not callable(found):
        raise InvalidStream(f"{name} is not a function")
    return found
