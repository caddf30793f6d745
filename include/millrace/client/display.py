"""Representations of a database, a collection and an outcome in a Python session and in a notebook.

Nothing here reads rows. A representation never raises: what cannot be fetched is left out with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

if TYPE_CHECKING:
    from millrace.catalog.collection import CollectionInfo
    from millrace.client.produce.written import Written
    from millrace.message.schema import CollectionSchema

_SHORT: Final = 8
"""Fields in a collection's one-line representation."""


def collection_line(name: str, schema: CollectionSchema) -> str:
    """Return a collection in one line, with its first fields."""
    fields = [f"{each.name}: {each.type}{'?' * each.nullable}" for each in schema.fields]
    if len(fields) > _SHORT:
        fields = [*fields[: _SHORT - 1], f"… {len(fields) - _SHORT + 1} more"]
    return f"<Collection {name!r} ({', '.join(fields)}), key {schema.primary_key!r}>"


def fields_table(schema: CollectionSchema) -> pa.Table:
    """Return one row for each field: field, type, nullable, key, default, computed."""
    rules = _rules(schema)
    names = [each.name for each in schema.fields]
    return pa.table(
        {
            "field": pa.array(names, pa.string()),
            "type": pa.array([each.type for each in schema.fields], pa.string()),
            "nullable": pa.array([each.nullable for each in schema.fields], pa.bool_()),
            "key": pa.array([name in schema.key_names for name in names], pa.bool_()),
            "default": pa.array([rules.get(f"default {name}") for name in names], pa.string()),
            "computed": pa.array([rules.get(f"computed {name}") for name in names], pa.string()),
        }
    )


def _rules(schema: CollectionSchema) -> dict[str, str]:
    if not (schema.has_fill_values or schema.has_row_rules):
        return {}
    from millrace.message.expression.rules import describe_rules  # most schemas have no rules

    return describe_rules(schema)


def collection_html(definition: CollectionInfo) -> str:
    """Return a collection's fields, rules, partitions and VChannels as HTML."""
    fields = fields_table(definition.schema)
    used = [name for name in fields.column_names if fields[name].null_count < fields.num_rows]
    rows = [[_mark(row[name]) for name in used] for row in fields.to_pylist()]
    notes = [f"partitions: {', '.join(definition.partitions)}", f"VChannels: {len(definition.vchannels)}"]
    if definition.schema.event_time:
        notes.append(f"event time: {definition.schema.event_time}")
    notes += [f"{name}: {rule}" for name, rule in _rules(definition.schema).items() if name.startswith("check ")]
    return _html(f"Collection {definition.name}", used, rows, notes)


def database_html(title: str, collections: Iterable[CollectionInfo]) -> str:
    """Return the names, keys and sizes of the schemas of a database's collections as HTML."""
    rows = [
        [
            each.name,
            ", ".join(each.schema.key_names),
            len(each.schema.fields),
            len(each.partitions),
            len(each.vchannels),
        ]
        for each in sorted(collections, key=lambda each: each.name)
    ]
    return _html(title, ["collection", "key", "fields", "partitions", "VChannels"], rows, [])


def written_html(written: Written) -> str:
    """Return the figures of an outcome, and its rejections by reason, as HTML."""
    rows: list[list[Any]] = [["rows", written.rows], ["messages", written.messages], ["bytes", written.bytes]]
    if written.last_tick:
        rows.append(["last tick", str(written.last_tick)])
    if written.spooled_rows:
        rows.append(["rows in the spool", written.spooled_rows])
    rows += [[f"rejected: {reason}", count] for reason, count in sorted(written.rejected_by_reason.items())]
    return _html("Written", ["", ""], rows, [])


def _mark(value: object) -> object:
    return "" if value is None or value is False else "✓" if value is True else value


def _html(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str]) -> str:
    def cells(tag: str, values: Sequence[Any]) -> str:
        return "".join(
            f'<{tag} style="text-align: {"right" if isinstance(each, int) else "left"}">'
            f"{f'{each:,}' if isinstance(each, int) else escape(str(each))}</{tag}>"
            for each in values
        )

    head = f"<thead><tr>{cells('th', names)}</tr></thead>" if any(names) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    below = f"<p>{escape(' · '.join(notes))}</p>" if notes else ""
    return f"<div><p><b>{escape(title)}</b></p><table>{head}<tbody>{body}</tbody></table>{below}</div>"
