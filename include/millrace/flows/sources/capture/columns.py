"""A captured table's columns as a collection's columns, from the engine's description of the table."""

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
TYPE: Final = "millrace.type"
"""The parameter of a PostgreSQL column with its base type. To the engine, all of them are texts."""
PRECISION: Final = "millrace.precision"
SCALE: Final = "millrace.scale"
"""The parameters of a numeric column with a fixed number of digits."""
_POSTGRES: Final = {
    "int2": "int16",
    "int4": "int32",
    "int8": "int64",
    "oid": "int64",
    "money": "decimal(19,2)",
    "float4": "float32",
    "float8": "float64",
    "bool": "bool",
    "bytea": "binary",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
    "uuid": "uuid",
}
_MAX_BITS: Final = 63
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
_BITS: Final = "io.debezium.data.Bits"


def table_columns(description: Mapping[str, Any]) -> TableColumns:
    """Return the columns of a description. All except the key's are nullable, as an added column must be.

    The description of a source other than the engine has the collection's types already.
    """
    key = tuple(description["key"])
    types = {name: kind if name in key else f"{kind}?" for name, kind in description.get("types", {}).items()}
    for each in description.get("columns", ()):
        name = each["name"]
        kind = _type(each["type"], each["meaning"], each["parameters"])
        if name in key:  # a key's type cannot be widened
            types[name] = "int64" if kind.startswith("int") else kind
        else:
            types[name] = f"{kind}?"
    return TableColumns(types, key)


def _type(kind: str, meaning: str | None, parameters: Mapping[str, str]) -> str:
    if TYPE in parameters:
        return _of_postgres(parameters[TYPE], parameters)
    if meaning == _DECIMAL:
        # Without digits, it is a BIGINT UNSIGNED.
        digits, scale = int(parameters.get("connect.decimal.precision", 20)), int(parameters["scale"])
        return f"decimal({digits},{scale})" if digits <= MAX_PRECISION else "string"
    if meaning == _BITS:
        return "int64" if int(parameters.get("length", 64)) <= _MAX_BITS else "decimal(20,0)"
    return _MEANINGS.get(meaning or "") or _PLAIN.get(kind) or kind


def has_any_digits(parameters: Mapping[str, str]) -> bool:
    """Return whether a column with these parameters is a number that a collection stores as text."""
    return parameters.get(TYPE) == "numeric" and _of_postgres("numeric", parameters) == "string"


def _of_postgres(kind: str, parameters: Mapping[str, str]) -> str:
    if kind.startswith("_"):
        return "json"
    if kind != "numeric" or PRECISION not in parameters:  # a numeric without digits may have unlimited ones
        return _POSTGRES.get(kind, "string")
    digits, scale = int(parameters[PRECISION]), int(parameters[SCALE])
    digits, scale = (digits - scale, 0) if scale < 0 else (max(digits, scale), scale)
    return f"decimal({digits},{scale})" if digits <= MAX_PRECISION else "string"
