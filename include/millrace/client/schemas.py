"""Collection schemas from user types: type names, a pyarrow schema, a DataFrame, a dataclass.

    schema({"id": "int64", "name": "string?"}, key="id")    # a question mark: nullable
    schema(User, key="id")                                  # class User: id: int; name: str | None
    schema(frame, key="id")

`User` is a dataclass or pydantic model. `frame` is pandas, Polars or pyarrow data, or anything with
``__arrow_c_schema__`` or ``__arrow_c_stream__``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import CONVERSION_ERRORS, is_pydantic_model
from millrace.client.produce.frames import is_from_library, reader_of, with_named_index
from millrace.message.field_types import MAX_DEPTH
from millrace.message.schema import CollectionSchema, FieldSpec, normalize_key_names, with_key_not_null
from millrace.message.types import OnDuplicate
from millrace.rpc.selection import ColumnNames, name_list

if TYPE_CHECKING:  # not needed by programs that change no schema
    from millrace.message.expression.rules import UntypedExpression
    from millrace.message.schema_changes import SchemaChange

SchemaSource: TypeAlias = CollectionSchema | Mapping[str, str] | pa.Schema | type | Any
"""Source of a schema; `Any` is a DataFrame of any library."""

_BY_CLASS: Final[dict[Any, str]] = {
    bool: "bool",
    int: "int64",
    float: "float64",
    str: "string",
    bytes: "binary",
    date: "date",
    datetime: "timestamp",
    time: "int64",
    timedelta: "int64",
    UUID: "uuid",
}


def schema(
    source: SchemaSource,
    *,
    key: str | Sequence[str] | None = None,
    event_time: str | None = None,
    on_duplicate: OnDuplicate = "keep",
    generated_key: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    computed: Mapping[str, str] | None = None,
    checks: Mapping[str, str] | None = None,
) -> CollectionSchema:
    """Make the schema of a collection.

    `source` is a dict of types by column (``"int64"``; ``"string?"`` is nullable), a pyarrow schema, a dataclass or
    pydantic model (a field ``X | None`` is nullable), a DataFrame, or a schema, which is returned unchanged. `key`
    names the primary key's column or columns, in order; they must not be nullable. `event_time` names the timestamp or
    date of a row. `on_duplicate` says what an insert does if a row has its key: ``"keep"`` keeps both, ``"replace"``
    upserts. Instead of `key`, `generated_key` names a uuid column that is added in front; producers fill it in rows
    that have none.

    `defaults` maps a column to its value in rows that lack it, or to ``"now()"`` for a date or timestamp. `computed`
    maps a column to the expression of its value. `checks` maps a name to a condition that every row must meet
    (docs/expressions.md).

    Raises InvalidArgument, which names the column and the accepted values.
    """
    found = _schema(source, key, event_time, on_duplicate, generated_key)
    return with_rules(found, defaults or {}, computed or {}, checks or {})


def with_rules(
    found: CollectionSchema, defaults: Mapping[str, Any], computed: Mapping[str, str], checks: Mapping[str, str]
) -> CollectionSchema:
    """Add defaults, computed fields and checks to a schema. Raises InvalidArgument."""
    if not (defaults or computed or checks):
        return found
    from millrace.message.expression.rules import CheckConstraint

    names_known = {field.name for field in found.fields}
    for name in (*defaults, *computed):
        if name not in names_known:
            raise InvalidArgument(
                f"there is no column {name!r}; there are {', '.join(field.name for field in found.fields)}"
            )
    fields = tuple(
        dataclasses.replace(
            field,
            default=defaults.get(field.name, field.default),
            computed=_draft(computed[field.name], "a computed column") if field.name in computed else field.computed,
        )
        for field in found.fields
    )
    more = tuple(CheckConstraint(name, _draft(text, "a check")) for name, text in checks.items())
    return dataclasses.replace(found, fields=fields, checks=(*found.checks, *more))


def _draft(text: object, what: str) -> UntypedExpression:
    from millrace.message.expression.rules import UntypedExpression

    if not isinstance(text, str):
        raise InvalidArgument(f"{what} is an expression as text, not {type(text).__name__}")
    return UntypedExpression(text)


def _schema(
    source: SchemaSource,
    key: str | Sequence[str] | None,
    event_time: str | None,
    on_duplicate: OnDuplicate,
    generated_key: str | None,
) -> CollectionSchema:
    if isinstance(source, CollectionSchema):
        given = (normalize_key_names(key or source.primary_key), event_time or source.event_time)
        if given != (source.primary_key, source.event_time) or on_duplicate not in ("keep", source.on_duplicate):
            raise InvalidArgument("a schema has its key, event time and on_duplicate already: do not give them again")
        if generated_key is not None and (generated_key, True) != (source.primary_key, source.generated_key):
            raise InvalidArgument("the schema already says whether its key is generated: leave the argument out")
        return source
    if generated_key is not None:
        if key not in (None, generated_key):
            raise InvalidArgument(f"the key is generated as {generated_key!r}: do not give another key")
        return with_generated_key(_fields(source), generated_key, event_time=event_time, on_duplicate=on_duplicate)
    if key is None:
        raise InvalidArgument("name the primary key: key=... (or generated_key=..., where rows have none)")
    names = normalize_key_names(key)
    fields = _fields(source)
    if isinstance(source, Mapping | type):  # Arrow's fields are nullable unless they say otherwise
        keys = (names,) if isinstance(names, str) else names
        for field in fields:
            if field.nullable and field.name in keys:
                raise InvalidArgument(
                    f"the key {field.name!r} may not be null: its type is {field.type}, without a question mark"
                )
    return CollectionSchema(with_key_not_null(fields, names), names, event_time, on_duplicate)


def alter_changes(
    *,
    drop_check: ColumnNames = (),
    drop_default: ColumnNames = (),
    drop: ColumnNames = (),
    rename: Mapping[str, str] | None = None,
    widen: Mapping[str, str] | None = None,
    relax: ColumnNames = (),
    add: SchemaSource | None = None,
    computed: Mapping[str, str] | None = None,
    order: ColumnNames = (),
    set_default: Mapping[str, Any] | None = None,
    add_check: Mapping[str, str] | None = None,
) -> list[SchemaChange]:
    """Make the list of schema changes from user types, in the order of the parameters.

    A later change refers to fields by their new names. `add` takes what :func:`schema` takes; its fields must be
    nullable, because existing rows lack them, except inside a struct. `computed` gives the expressions of added fields.

    Raises InvalidArgument.
    """
    from millrace.message.schema_changes import (
        AddCheck,
        AddField,
        DropCheck,
        DropDefault,
        DropField,
        MakeNullable,
        RenameField,
        ReorderFields,
        SetDefault,
        WidenField,
    )

    made: list[SchemaChange] = [DropCheck(name) for name in name_list(drop_check)]
    made += [DropDefault(name) for name in name_list(drop_default)]
    made += [DropField(name) for name in name_list(drop)]
    made += [RenameField(name, to) for name, to in (rename or {}).items()]
    made += [WidenField(name, kind.removesuffix("?")) for name, kind in (widen or {}).items()]
    made += [MakeNullable(name) for name in name_list(relax)]
    added, rules = _fields(add) if add is not None else [], computed or {}
    unknown = set(rules) - {field.name for field in added}
    if unknown:
        raise InvalidArgument(f"{min(unknown)!r} is computed but not added: add={{{min(unknown)!r}: its type}}")
    for field in added:
        if not field.nullable and "." not in field.name:
            raise InvalidArgument(
                f"the rows that are there have no {field.name!r}, so it may be null: write '{field.type}?' (in a"
                " class: X | None)"
            )
        rule = _draft(rules[field.name], "a computed column") if field.name in rules else None
        made.append(AddField(dataclasses.replace(field, nullable=True, computed=rule)))
    made += [ReorderFields(tuple(name_list(order)))] if name_list(order) else []
    made += [SetDefault(name, value) for name, value in (set_default or {}).items()]
    made += [AddCheck(name, _draft(text, "a check")) for name, text in (add_check or {}).items()]
    if not made:
        raise InvalidArgument(
            "name a change: drop_check, drop_default, drop, rename, widen, relax, add, computed, order, set_default,"
            " add_check"
        )
    return made


def with_generated_key(
    fields: Sequence[FieldSpec], name: str, *, event_time: str | None = None, on_duplicate: OnDuplicate = "keep"
) -> CollectionSchema:
    """Make a schema whose key is the generated uuid field `name`, added in front of `fields` if missing."""
    if all(field.name != name for field in fields):
        fields = [FieldSpec(name, "uuid", False), *fields]
    return CollectionSchema(with_key_not_null(fields, name), name, event_time, on_duplicate, generated_key=True)


def _fields(source: Any) -> list[FieldSpec]:
    if isinstance(source, Mapping):
        return [_named(name, kind) for name, kind in source.items()]
    if isinstance(source, type):
        hints = _hints(source)
        if hints is None:
            raise InvalidArgument(
                f"{source.__name__} is neither a dataclass nor a pydantic model: decorate it with @dataclass, or give"
                " types by column"
            )
        return [_of_hint(name, hint) for name, hint in hints.items()]
    return [FieldSpec.from_arrow(field) for field in arrow_schema(source)]


def _hints(kind: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass or pydantic model with their types; None for any other class."""
    if dataclasses.is_dataclass(kind):
        found = [field.name for field in dataclasses.fields(kind)]
    elif isinstance(kind, type) and is_pydantic_model(kind):
        found = list(kind.model_fields)  # type: ignore[attr-defined]
    else:
        return None
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in found}


def _named(name: str, kind: object) -> FieldSpec:
    if isinstance(kind, pa.DataType):
        return FieldSpec.from_arrow(pa.field(name, kind, nullable=False))
    if not isinstance(kind, str):
        raise InvalidArgument(f'the type of {name!r} is text, such as "int64" or "string?", not {type(kind).__name__}')
    return FieldSpec(name, kind.removesuffix("?"), kind.endswith("?"))


def _of_hint(name: str, hint: Any) -> FieldSpec:
    arms = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    chosen = [arm for arm in arms if arm is not types.NoneType]
    kind = _text_of(chosen[0], MAX_DEPTH) if len(chosen) == 1 else None
    if kind is None:
        takes = ", ".join(each.__name__ for each in _BY_CLASS)
        raise InvalidArgument(
            f"field {name!r}: {hint} has no type here; a class has {takes}, lists, dicts and classes of these, and X |"
            " None"
        )
    return FieldSpec(name, kind, len(chosen) < len(arms))


def _text_of(hint: Any, levels: int) -> str | None:
    """Return the type of a hint as text, without nullability; None if the hint has no type here."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        chosen = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
        return _text_of(chosen[0], levels) if len(chosen) == 1 else None
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if levels == 0:
        return None
    if origin in (list, dict):
        parts = [_text_of(each, levels - 1) for each in inner]
        return None if None in parts else f"{'list' if origin is list else 'map'}<{', '.join(map(str, parts))}>"
    hints = _hints(hint)
    if hints is not None:
        members = [(name, _text_of(each, levels - 1)) for name, each in hints.items()]
        return (
            None if None in dict(members).values() else f"struct<{', '.join(f'`{n}`: {part}' for n, part in members)}>"
        )
    return _BY_CLASS.get(hint)


def arrow_schema(source: Any) -> pa.Schema:
    """Return the Arrow schema of a pyarrow schema, Arrow data or a DataFrame. Raises InvalidArgument."""
    if isinstance(source, pa.Schema):
        return source
    if isinstance(source, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return source.schema
    if is_from_library(source, "pandas") and hasattr(source, "columns"):
        try:
            return pa.Schema.from_pandas(with_named_index(source), preserve_index=False).remove_metadata()
        except CONVERSION_ERRORS as error:
            raise InvalidArgument(f"the DataFrame is not a table with one type per column: {error}") from None
    if hasattr(source, "mapInArrow"):  # Spark, whose own Arrow stream (4.2) has no timestamps
        return source.limit(0).toArrow().schema
    if hasattr(source, "__arrow_c_schema__"):
        return pa.schema(source)
    if hasattr(source, "__arrow_c_stream__"):
        return reader_of(source).schema
    raise InvalidArgument(
        f"{type(source).__name__} is not a schema: pass a dict of types by column, a pyarrow schema, a dataclass or a"
        " DataFrame"
    )
