"""A collection that is created from a table's columns and follows their changes.

An added column becomes a nullable one; a dropped column is dropped; a type becomes a wider one, and a column becomes
nullable if the table's is. The source must return rows again that a change of the table modified.

A history has its own columns besides the table's, and the number of a version in its key. A column that the table drops
stays in it, since earlier versions have its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from millrace.base.errors import CollectionExists, InvalidArgument, SinkRefused
from millrace.client.database import Database
from millrace.flows.batch import TableColumns
from millrace.flows.sinks.collection.history import history_schema
from millrace.flows.sinks.collection.model import History
from millrace.message.field_types import FieldType, parse_type
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import widens

OnSchemaChange = Literal["alter", "stop"]

_TIMES: Final = frozenset({"date", "timestamp", "timestamp_ntz"})
_TEXTS: Final = frozenset({"string", "json", "uuid"})
_INTEGERS: Final = frozenset({"int8", "int16", "int32", "int64"})


@dataclass(slots=True)
class Changes:
    """The changes that make a collection's schema match a table."""

    add: dict[str, str] = field(default_factory=dict)
    drop: list[str] = field(default_factory=list)
    widen: dict[str, str] = field(default_factory=dict)
    relax: list[str] = field(default_factory=list)
    other: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Columns whose type cannot become the table's, with both types."""

    def __bool__(self) -> bool:
        return bool(self.add or self.drop or self.widen or self.relax)

    def arguments(self) -> Mapping[str, Any]:
        """Return the arguments of `Collection.alter`."""
        given = {"add": self.add, "drop": self.drop, "widen": self.widen, "relax": self.relax}
        return {name: value for name, value in given.items() if value}


def create(database: Database, name: str, columns: TableColumns | None, history: History | None = None) -> None:
    """Create the collection from a table's columns if it does not exist.

    Raises SinkRefused if the columns are unknown, or if the table lacks the column by which `history` orders changes.
    """
    if name in database:
        return
    if columns is None:
        raise SinkRefused(
            f"there is no collection {name!r}, and its columns cannot be derived from the records: create it"
        )
    try:
        if history is None:
            database.create_collection(name, dict(columns.types), key=columns.key)
        else:
            database.create_collection(name, _with_history(columns, history))
    except CollectionExists:  # another worker was first
        return


def _with_history(columns: TableColumns, history: History) -> CollectionSchema:
    clock = "timestamp" if history.sequence is None else columns.types.get(history.sequence, "").removesuffix("?")
    if not clock:
        raise SinkRefused(f"the table has no column {history.sequence!r}, which history.sequence names")
    fields = [FieldSpec(each, kind.removesuffix("?"), each not in columns.key) for each, kind in columns.types.items()]
    return history_schema(CollectionSchema(tuple(fields), columns.key), history, clock=clock)


def follow(
    database: Database, name: str, columns: TableColumns, mode: OnSchemaChange, history: History | None = None
) -> None:
    """Make the collection's schema match the table, or stop. Raises SinkRefused with the command to run."""
    collection = database[name]
    schema = collection.schema
    found = changes_between(schema, columns)
    key = schema.key_names
    if history is not None:
        found.drop.clear()
        for each in (history.sequence, *history.deletes):  # a history can do without their columns
            found.add.pop(each or "", None)
        key = tuple(each for each in key if each != history.version)
    if mode == "stop":
        if found.add:
            raise SinkRefused(f"the table has columns that {name!r} lacks: {_command(name, Changes(add=found.add))}")
        return
    if key != columns.key:
        raise SinkRefused(
            f"the primary key of {name!r} is {', '.join(key)}, and the table's is now"
            f" {', '.join(columns.key)}: a key cannot change. Start a flow with a new id into a new collection"
        )
    if found.other:
        words = ", ".join(f"{each} was {old} and is {new}" for each, (old, new) in found.other.items())
        raise SinkRefused(
            f"{name!r} cannot follow the table: {words}. {_command(name, Changes(drop=list(found.other)))}; the flow"
            " then adds the columns again, with the table's values"
        )
    if found:
        try:
            collection.alter(**found.arguments())
        except InvalidArgument as error:
            raise SinkRefused(f"{name!r} cannot follow the table: {error}") from None


def changes_between(schema: CollectionSchema, columns: TableColumns) -> Changes:
    """Return the changes that make `schema` match `columns`. Computed columns and wider types are not changed."""
    have = {each.name: each for each in schema.fields}
    found = Changes()
    for name, text in columns.types.items():
        wanted, nullable = parse_type(text.removesuffix("?")), text.endswith("?")
        known = have.get(name)
        if known is None:
            found.add[name] = f"{wanted.text}?"
            continue
        if name in schema.key_names:
            continue
        if nullable and not known.nullable:
            found.relax.append(name)
        if _holds(known.parsed_type, wanted):
            continue
        if widens(known.parsed_type, wanted):
            found.widen[name] = wanted.text
        else:
            found.other[name] = (known.type, wanted.text)
    found.drop = [
        each.name
        for each in schema.fields
        if each.name not in columns.types and each.computed is None and each.name not in schema.key_names
    ]
    return found


def _holds(have: FieldType, wanted: FieldType) -> bool:
    """Return whether a field of the type `have` holds values of the type `wanted`, in the form of records."""
    if have == wanted or widens(wanted, have):
        return True
    kinds = have.kind, wanted.kind
    if set(kinds) <= _TIMES or set(kinds) <= _TEXTS:
        return True
    if have.kind == "decimal" and wanted.kind in _INTEGERS:
        return True
    if set(kinds) == {"decimal"}:
        return have.scale >= wanted.scale and have.precision - have.scale >= wanted.precision - wanted.scale
    return have.kind in ("float64", "float32") and wanted.kind in ("float64", "decimal")


def _command(name: str, changes: Changes) -> str:
    words = [f"--add '{each}:{kind}'" for each, kind in changes.add.items()]
    words += [f"--drop '{each}'" for each in changes.drop]
    return f"run `millrace collections alter {name} {' '.join(words)}`"
