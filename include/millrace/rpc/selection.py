"""Selection of a collection's rows: which columns, which rows, how many, in which order. Sent as JSON."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypedDict

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.message.ids import Moment

if TYPE_CHECKING:  # not needed by producers
    from millrace.base.predicate.language import Condition

_ORDER: Final = re.compile(r"(`(?:[^`]|``)+`|\S+?)(?:\s+(asc|desc))?", re.IGNORECASE)

ColumnNames: TypeAlias = str | Sequence[str]
"""Column names as a list, or as comma-separated text."""


class SelectionOptions(TypedDict, total=False):
    """Options that select rows, in user types."""

    columns: ColumnNames | None
    where: str | None
    limit: int | None
    order_by: ColumnNames | None


class ReadOptions(SelectionOptions, total=False):
    """Options of a read: the moment, the selection, and how many seconds to wait for the tables."""

    at: Moment | None
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Selection:
    """A parsed selection.

    `where` is a predicate (:mod:`millrace.base.predicate.language`); `order_by` has columns and whether they descend.
    """

    columns: tuple[str, ...] | None = None
    where: str | None = None
    limit: int | None = None
    order_by: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def of(
        cls,
        *,
        columns: ColumnNames | None = None,
        where: str | None = None,
        limit: int | None = None,
        order_by: ColumnNames | None = None,
    ) -> Self:
        """Parse a selection, such as ``order_by=["price desc", "id"]``. Raises InvalidArgument if it is not valid."""
        if where is not None and not isinstance(where, str):
            raise InvalidArgument(
                f"where is a predicate as text, such as \"city = 'Oslo'\", not {type(where).__name__}"
            )
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidArgument(f"limit is a number of rows, at least 0, not {limit!r}")
        chosen = None if columns is None else tuple(name_list(columns))
        if chosen is not None and (not chosen or len(set(chosen)) < len(chosen)):
            raise InvalidArgument(f"columns are at least one, each once, not {', '.join(chosen) or 'none'}")
        made = cls(chosen, where, limit, tuple(map(_ordered, name_list(order_by or ()))))
        _ = made.condition
        return made

    def to_json(self) -> dict[str, Any]:
        """Return the options that differ from selecting everything."""
        wanted = {"columns": self.columns, "where": self.where, "limit": self.limit, "order_by": self.order_by or None}
        return {name: value for name, value in wanted.items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`to_json`, ignoring other keys. Raises InvalidArgument."""
        try:
            made = cls.of(columns=value.get("columns"), where=value.get("where"), limit=value.get("limit"))
            order = tuple((str(name), bool(descends)) for name, descends in value.get("order_by") or ())
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"this is not a selection of rows: {error}") from None
        return cls(made.columns, made.where, made.limit, order)

    @property
    def condition(self) -> Condition | None:
        """The parsed `where`. Raises InvalidArgument."""
        from millrace.base.predicate.language import parse_condition

        return None if self.where is None else parse_condition(self.where)

    def names(self, schema: pa.Schema) -> list[str]:
        """Return the selected columns, in order. Raises InvalidArgument for a missing one."""
        for each in (*(self.columns or ()), *(name for name, _ in self.order_by)):
            if each not in schema.names:
                raise InvalidArgument(f"there is no column {each!r}; there are {', '.join(schema.names)}")
        return schema.names if self.columns is None else list(self.columns)

    @property
    def referenced_columns(self) -> set[str]:
        """The columns that `where` and `order_by` refer to."""
        from millrace.base.predicate.language import column_names

        found = self.condition
        return {*(name for name, _ in self.order_by), *(() if found is None else column_names(found))}

    def expression(self, schema: pa.Schema) -> pc.Expression | None:
        """Return `where` as an expression over these columns. Raises InvalidArgument if it does not fit them."""
        from millrace.base.predicate.arrow import compile_condition

        found = self.condition
        return None if found is None else compile_condition(found, schema)


ALL_ROWS: Final = Selection()


def keys_to_text(keys: pa.RecordBatch) -> str:
    """Return primary keys as text for a request: an Arrow stream in base64."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, keys.schema) as stream:
        stream.write_batch(keys)
    return base64.b64encode(sink.getvalue()).decode()


def keys_from_text(text: Any) -> pa.RecordBatch:
    """Return the keys of :func:`keys_to_text`. Raises InvalidArgument."""
    try:
        with pa.ipc.open_stream(base64.b64decode(text, validate=True)) as stream:
            found = stream.read_next_batch()
            found.validate(full=True)
            return found
    except (pa.ArrowException, OSError, TypeError, ValueError, StopIteration) as error:
        raise InvalidArgument(f"these are not the keys of rows: {error}") from None


def name_list(given: ColumnNames) -> list[str]:
    """Return names as a list. Raises InvalidArgument."""
    if isinstance(given, str):
        given = [each.strip() for each in given.split(",") if each.strip()]
    if not all(isinstance(each, str) for each in given):
        raise InvalidArgument("columns are given by their names")
    return list(given)


def _ordered(text: str) -> tuple[str, bool]:
    found = _ORDER.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(f"{text!r} is not an order: give a column, followed by asc or desc")
    return found[1].strip("`"), (found[2] or "").lower() == "desc"
