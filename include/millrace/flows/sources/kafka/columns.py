"""Records of topics as Arrow rows: the record's own columns, and typed columns decoded from JSON values.

Numbers retain their digits: a decimal is parsed from the text of the value, and an integer that does not fit its type
is refused, never rounded. A record that cannot be decoded is returned beside the rows, with the reason, since one
malformed value must not stop a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.flows.records import Record
from millrace.flows.sources.kafka.model import RECORD_TIME
from millrace.message.field_types import FieldType
from millrace.message.schema import FieldSpec

RECORD: Final = pa.schema(
    [
        pa.field("_key", pa.binary()),
        pa.field("_value", pa.binary()),
        pa.field("_headers", pa.list_(pa.struct([("name", pa.utf8()), ("value", pa.binary())]))),
        pa.field("_topic", pa.utf8()),
        pa.field("_partition", pa.int32()),
        pa.field("_offset", pa.int64()),
        pa.field(RECORD_TIME, pa.timestamp("us", "UTC")),
    ]
)
"""The types of millrace.flows.sources.kafka.model.RECORD_COLUMNS."""

REASON: Final = "reason"
_CONVERSION_ERRORS: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
Tombstones: TypeAlias = Literal["error", "ignore"]


class Undecoded(NamedTuple):
    """A record that cannot be decoded, and the reason."""

    record: Record
    reason: str


def record_columns(records: Sequence[Record], names: Iterable[str] = RECORD.names) -> dict[str, pa.Array]:
    """Return those columns of RECORD that `names` lists."""
    make: dict[str, Callable[[], list[Any]]] = {
        "_key": lambda: [each.key for each in records],
        "_value": lambda: [each.value for each in records],
        "_headers": lambda: [[{"name": name, "value": value} for name, value in each.headers] for each in records],
        "_topic": lambda: [each.topic for each in records],
        "_partition": lambda: [each.partition for each in records],
        "_offset": lambda: [each.offset for each in records],
        RECORD_TIME: lambda: [each.timestamp * 1000 if each.timestamp >= 0 else None for each in records],
    }
    return {name: pa.array(make[name](), RECORD.field(name).type) for name in names}


def undecoded_rows(found: Sequence[Undecoded]) -> pa.Table:
    """Return undecoded records as a table: the columns of RECORD, and the reason."""
    columns = record_columns([each.record for each in found])
    return pa.table({**columns, REASON: pa.array([each.reason for each in found], pa.utf8())})


def records_of(table: pa.Table) -> list[Record]:
    """Return the records of a table with the columns of RECORD."""
    return [
        Record(
            row["_topic"],
            row["_partition"],
            row["_offset"],
            row["_key"],
            row["_value"],
            -1 if row[RECORD_TIME] is None else round(row[RECORD_TIME].timestamp() * 1000),
            [(each["name"], each["value"]) for each in row["_headers"]],
        )
        for row in table.to_pylist()
    ]


class RecordRows:
    """Turns records into rows: `columns` of their JSON values, and the columns `record` of RECORD."""

    def __init__(self, columns: Mapping[str, str], record: Sequence[str], *, tombstones: Tombstones = "error") -> None:
        """`columns` maps a document's field to its type ("int64"; "string?" may be null or missing).

        Raises InvalidArgument for an unknown type or record column.
        """
        unknown = [name for name in record if name not in RECORD.names]
        if unknown:
            raise InvalidArgument(f"a record has no column {unknown[0]!r}: it has {', '.join(RECORD.names)}")
        self._fields = [FieldSpec(name, kind.removesuffix("?"), kind.endswith("?")) for name, kind in columns.items()]
        self._record = tuple(record)
        self._tombstones = tombstones
        self.schema = pa.schema([*(each.arrow() for each in self._fields), *(RECORD.field(each) for each in record)])
        self._decode = _decoder(self._fields) if self._fields else None

    def rows(self, records: Sequence[Record]) -> tuple[pa.RecordBatch, list[Undecoded]]:
        """Return the rows of the decodable `records` in order, and the others with their reasons."""
        bad: list[Undecoded] = []
        columns: list[pa.Array] = []
        if self._decode is not None:
            records, documents = self._documents(records, self._decode, bad)
            records, columns = self._columns(records, documents, bad)
        found = record_columns(records, self._record)
        return pa.RecordBatch.from_arrays([*columns, *found.values()], schema=self.schema), bad

    def _documents(
        self, records: Sequence[Record], decode: Callable[[bytes], Any], bad: list[Undecoded]
    ) -> tuple[list[Record], list[Any]]:
        read, documents = [], []
        for record in records:
            if record.value is None:
                if self._tombstones == "error":
                    bad.append(Undecoded(record, "the record has no value"))
                continue
            try:
                document = decode(record.value)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                bad.append(Undecoded(record, str(error)))
                continue
            read.append(record)
            documents.append(document)
        return read, documents

    def _columns(
        self, records: list[Record], documents: list[Any], bad: list[Undecoded]
    ) -> tuple[list[Record], list[pa.Array]]:
        wrong: dict[int, str] = {}
        columns: list[pa.Array] = []
        for number, field in enumerate(self._fields):
            columns.append(_column(field, [getattr(each, f"f{number}") for each in documents], wrong))
        if wrong:
            bad += [Undecoded(records[place], reason) for place, reason in sorted(wrong.items())]
            right = [place for place in range(len(records)) if place not in wrong]
            records = [records[place] for place in right]
            columns = [each.take(pa.array(right, pa.int64())) for each in columns]
        return records, columns


def _column(field: FieldSpec, values: list[Any], wrong: dict[int, str]) -> pa.Array:
    """Return `values` as an array of the field's type, with null for those that do not fit it: `wrong`, by place."""
    kind, arrow = field.parsed_type.kind, field.parsed_type.arrow
    if kind == "json":
        values = [_json_text(each) for each in values]
    try:
        return pa.array(values, arrow)
    except _CONVERSION_ERRORS:
        pass
    found = list(values)
    for place, value in enumerate(values):
        try:
            if isinstance(value, str) and kind.startswith("int"):
                found[place] = int(value)
            pa.array(found[place : place + 1], arrow)
        except _CONVERSION_ERRORS as error:
            found[place] = None
            wrong.setdefault(place, f"{field.name}: {str(value)[:80]!r} is not a valid {field.type}: {error}")
    return pa.array(found, arrow)


def _json_text(value: msgspec.Raw) -> str | None:
    text = bytes(value).decode()
    return None if text == "null" else text


def _decoder(fields: Sequence[FieldSpec]) -> Callable[[bytes], Any]:
    made: list[tuple[str, Any, Any] | tuple[str, Any]] = []
    for number, field in enumerate(fields):
        if field.nullable and field.parsed_type.kind == "json":
            made.append((f"f{number}", msgspec.Raw, msgspec.Raw(b"null")))
        elif field.nullable:
            made.append((f"f{number}", _python_type(field.parsed_type) | None, None))
        else:
            made.append((f"f{number}", _python_type(field.parsed_type)))
    names = {f"f{number}": field.name for number, field in enumerate(fields)}
    shape = msgspec.defstruct("Document", made, rename=names, kw_only=True, gc=False)
    return msgspec.json.Decoder(shape).decode


_PYTHON: Final[dict[str, Any]] = {
    "bool": bool,
    "float32": float,
    "float64": float,
    "string": str,
    "uuid": str,
    "json": msgspec.Raw,
    "binary": bytes,
    "date": date,
    "timestamp": datetime,
    "timestamp_ntz": Annotated[datetime, msgspec.Meta(tz=False)],
    "decimal": Decimal,
}


def _python_type(kind: FieldType) -> Any:
    """Return the type by which msgspec checks a JSON value: strict, but an integer may be text to retain its digits."""
    if kind.kind in _PYTHON:
        return _PYTHON[kind.kind]
    children: list[Any] = [_python_type(each) for each in kind.children]
    match kind.kind:
        case "list":
            return list[children[0] | None]  # type: ignore[valid-type] # made at run time
        case "map":
            return dict[children[0], children[1] | None]  # type: ignore[valid-type] # made at run time
        case "struct":
            make: Any = TypedDict
            return make(
                "Part", {name: child | None for name, child in zip(kind.names, children, strict=True)}, total=False
            )
        case _:
            return int | str
