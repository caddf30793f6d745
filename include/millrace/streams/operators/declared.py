"""The operator of a declared stream as data (docs/operators.md), checked without Spark, and the operator it makes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from millrace.base.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace.streams.keyed.operator import Operator

_DURATION: Final = re.compile(r"(\d+) (second|minute|hour|day)s?")
_AGGREGATE: Final = re.compile(r"\s*(\w+)\s*\(\s*(\*|[^()]+?)\s*\)\s*")
LOG_TIME: Final = "_log_time"
"""Event time of a row without one of its own: when it became visible, by its time tick."""
LOG_TIME_FIELD: Final = "log_time"
"""Name of LOG_TIME in a collection, whose fields cannot begin with an underscore."""
RIGHT: Final = "_right"
SIDE: Final = "right_side"
"""Name of RIGHT in a sink of late rows, which may be a collection."""
GONE: Final = "_right_gone"
ORDER: Final = "_right_order"
_RIGHT_OF: Final = "_right__"


def duration(value: str) -> timedelta:
    """Return a duration such as ``"90 minutes"`` as a timedelta. Raises InvalidArgument."""
    found = _DURATION.fullmatch(value)
    if found is None:
        raise InvalidArgument(
            f"{value!r} is not a duration: write a number of seconds, minutes, hours or days, such as '90 minutes'"
        )
    return timedelta(**{f"{found[2]}s": int(found[1])})


def _checked(value: object) -> object:
    if value is not None:
        try:
            duration(str(value))
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
    return value


Duration = Annotated[str | None, BeforeValidator(_checked)]
"""``"90 minutes"``: a number of seconds, minutes, hours or days."""


def right_name(column: str) -> str:
    """Return the name of a right side's column in the stream of both sides."""
    return f"{_RIGHT_OF}{column}"


def sink_names(names: Iterable[str], *, collection: bool) -> dict[str, str]:
    """Return the columns of a stream's rows with their names in its sink, which is a `collection` or not."""
    return {each: LOG_TIME_FIELD if collection and each == LOG_TIME else each for each in names}


def late_names(names: Iterable[str], *, collection: bool) -> dict[str, str]:
    """Return the columns of late rows in their sink, with their names there.

    An as-of join adds ``right_side``, the side of a row, and the right side's columns, such as ``right_temp``.
    """
    left_out = {GONE, ORDER}
    return {
        each: SIDE if each == RIGHT else f"right_{each.removeprefix(_RIGHT_OF)}" if each.startswith(_RIGHT_OF) else name
        for each, name in sink_names(names, collection=collection).items()
        if each not in left_out
    }


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WindowsOf(_Model):
    """Aggregates by key and window, or session."""

    aggregates: dict[str, str]
    """Aggregate by column of the answer: ``count(*)``, or count, sum, min, max or avg of a column: ``avg(delay)``."""
    keys: tuple[str, ...] = ()
    size: Duration = None
    slide: Duration = None
    gap: Duration = None
    lateness: Duration = None
    late: Literal["drop", "side", "correct"] = "side"
    keep: Duration = None

    @model_validator(mode="after")
    def _parses(self) -> WindowsOf:
        for name, text in self.aggregates.items():
            if _AGGREGATE.fullmatch(text) is None:
                raise ValueError(f"{name}: {text!r} is not an aggregate: write count(*), or avg(a_column)")
        return self

    def made(self, time: str) -> Operator:
        from millrace.streams.operators.windows import Windows

        asked = {}
        for name, text in self.aggregates.items():
            found = _AGGREGATE.fullmatch(text)
            assert found is not None
            asked[name] = (found[1].lower(), None if found[2] == "*" else found[2])
        lengths = {each: _length(getattr(self, each)) for each in ("size", "slide", "gap", "lateness", "keep")}
        return Windows(self.keys, time, asked, late=self.late, **lengths)


class DistinctOf(_Model):
    """The first row of each key, and another one if the previous answer is more than `within` before it."""

    keys: tuple[str, ...] = Field(min_length=1)
    within: Duration = None

    def made(self, time: str) -> Operator:
        from millrace.streams.operators.joins import Distinct

        return Distinct(self.keys, time, _length(self.within))


class PatternOf(_Model):
    """MATCH_RECOGNIZE (docs/patterns.md)."""

    match_recognize: str
    """The content of SQL's parentheses. ORDER BY begins with the stream's event time."""
    forget: Duration = None

    def made(self, time: str) -> Operator:
        from millrace.streams.operators.patterns import Patterns
        from millrace.streams.patterns.sql import parse

        return Patterns(parse(self.match_recognize), time, _length(self.forget))


class AsOfOf(_Model):
    """Each row, joined with the last row of another collection that has the same keys and is not after it."""

    collection: str
    keys: tuple[str, ...] = Field(min_length=1)
    """Columns of both sides."""
    columns: dict[str, str]
    """Columns of the right side in the answer, with their names there."""
    time: str
    """The right side's event time: a column, or ``_log_time``, when a row became visible.

    With ``_log_time``, a deleted row is no longer valid, and the join is with the version that was valid.
    """
    tolerance: Duration = None
    inner: bool = False
    left: tuple[str, ...] = ()
    """Columns of the stream in the answer. Default: all but the change columns."""
    policy: Literal["min", "max"] | None = None
    """The side whose watermark counts: the slower one ("min") or the faster one ("max").

    The default is "min", but "max" for ``_log_time``: a side that seldom changes would hold back all answers.
    """

    @property
    def versioned(self) -> bool:
        """Whether deletes of the right side count."""
        return self.time == LOG_TIME

    def made(self, time: str, left: tuple[str, ...]) -> Operator:
        from millrace.streams.operators.joins import AsOf

        right = tuple((right_name(column), name) for column, name in self.columns.items())
        gone = GONE if self.versioned else None
        policy = self.policy or ("max" if self.versioned else "min")
        tolerance = _length(self.tolerance)
        return AsOf(
            self.keys, time, RIGHT, self.left or left, right, tolerance, gone, self.inner, (ORDER,), policy=policy
        )

    def both(self, left: pa.Schema, right: pa.Schema, time: str) -> pa.Schema:
        """Return the schema of the stream of both sides. Raises InvalidArgument if the right side does not fit."""
        import pyarrow as pa

        from millrace.streams.patterns.sorted_rows import column_of

        for name in self.keys:
            kinds = [each.field(column_of(each, name)).type for each in (left, right)]
            if kinds[0] != kinds[1]:
                raise InvalidArgument(f"the key {name!r} is {kinds[0]} here and {kinds[1]} in {self.collection!r}")
        if not self.versioned:
            kinds = [left.field(column_of(left, time)).type, right.field(column_of(right, self.time)).type]
            if kinds[0] != kinds[1]:
                raise InvalidArgument(f"the event time {time!r} is {kinds[0]}, and {self.time!r} {kinds[1]}")
        joined = [right.field(column_of(right, each)).with_name(right_name(each)) for each in self.columns]
        ours = [pa.field(RIGHT, pa.bool_()), pa.field(GONE, pa.bool_()), pa.field(ORDER, pa.int64())]
        return pa.schema([*left, *joined, *ours])


class Operation(_Model):
    """One operator: exactly one of `windows`, `distinct`, `pattern` and `as_of`."""

    windows: WindowsOf | None = None
    distinct: DistinctOf | None = None
    pattern: PatternOf | None = None
    as_of: AsOfOf | None = None
    shards: int = Field(default=2, ge=1, le=1024)
    """Number of shards of its keys, each with a task of its own. Fixed for the lifetime of the state."""

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_kind(self) -> Operation:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"an operator has exactly one of {', '.join(KINDS)}; this has {', '.join(given) or 'none'}"
            )
        return self

    def made(self, time: str, schema: pa.Schema) -> Operator:
        """Return the operator over rows of `schema` (of an as-of join: the left side's). Raises InvalidArgument."""
        from millrace.wal.visible.changes import CHANGE_COLUMNS

        if self.as_of is not None:
            changed = {each.name for each in CHANGE_COLUMNS}
            return self.as_of.made(time, tuple(each for each in schema.names if each not in changed))
        chosen: Any = getattr(self, self.kind)
        found: Operator = chosen.made(time)
        return found


KINDS: Final = ("windows", "distinct", "pattern", "as_of")


def _length(value: str | None) -> timedelta | None:
    return None if value is None else duration(value)
