"""A captured table's columns as those of a collection, from the description that the engine sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millrace.flows.batch import TableColumns
from millrace.message.field_types import MAX_PRECISION

_PLAIN: Final = {
    "float32": "float32",
    "float64": "float64",
    "boolean": "bool",
    "string": "string",
    "bytes": "binary",
    "array": "json",
    "struct": "json",
    "map": "json",
}
_MEANINGS: Final = {
    "io.debezium.time.Date": "date",
    "io.debezium.time.Timestamp": "timestamp_ntz",
    "io.debezium.time.MicroTimestamp": "timestamp_ntz",
    "io.debezium.time.ZonedTimestamp": "timestamp",
    "io.debezium.time.MicroTime": "string",
    "io.debezium.data.Uuid": "uuid",
}
_MAX_BITS: Final = 63
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
_BITS: Final = "io.debezium.data.Bits"


def table_columns(description: Mapping[str, Any]) -> TableColumns:
    """Return the columns of a description. All but those of the key may be null, as an added column has to be."""
    key = tuple(description["key"])
    types = {}
    for each in description["columns"]:
        name = each["name"]
        kind = _type(each["type"], each["meaning"], each["parameters"])
        if name in key:  # a key's type cannot become a wider one
            types[name] = "int64" if kind.startswith("int") else kind
        else:
            types[name] = f"{kind}?"
    return TableColumns(types, key)


def _type(kind: str, meaning: str | None, parameters: Mapping[str, str]) -> str:
    if meaning == _DECIMAL:
        # Without digits it is a BIGINT UNSIGNED.
        digits, scale = int(parameters.get("connect.decimal.precision", 20)), int(parameters["scale"])
        return f"decimal({digits},{scale})" if digits <= MAX_PRECISION else "string"
    if meaning == _BITS:
        return "int64" if int(parameters.get("length", 64)) <= _MAX_BITS else "decimal(20,0)"
    return _MEANINGS.get(meaning or "") or _PLAIN.get(kind) or kind
