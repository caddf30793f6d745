"""The suites: the laws as expectations on columns that :mod:`.frames` derives, and a suite derived from a schema.

Plain data; :mod:`.gx_validator` hands it to Great Expectations. The library has no expectation for some laws, such as
"strictly increasing within a PChannel". For these, Spark computes a column with a window function and a built-in
expectation checks that column, so that the Data Docs show the check in their own terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import BEHAVIOUR
from millrace.operations.quality.checks import CRITICAL, Check, CheckSource, Severity
from millrace.tables.wal.state_rows import MAX_INCREMENTS
from millrace.wal.reasons import Reason

SEGMENT_STATES: Final = ("growing", "sealed", "flushed", "dropped")
TYPE_NAMES: Final = sorted(kind.name for kind in BEHAVIOUR)
REASONS: Final = sorted(reason.value for reason in Reason)

_SPARK_TYPES: Final = {
    "bool": "BooleanType",
    "int8": "ByteType",
    "int16": "ShortType",
    "int32": "IntegerType",
    "int64": "LongType",
    "float32": "FloatType",
    "float64": "DoubleType",
    "string": "StringType",
    "binary": "BinaryType",
    "date": "DateType",
    "timestamp": "TimestampType",
    "timestamp_ntz": "TimestampNTZType",
    "uuid": "StringType",
    "json": "StringType",
}
_ID: Final = ["pchannel", "ledger", "entry", "index", "ordinal"]


def _between(name: str, column: str, words: str, *, low: int | None = None, high: int | None = None) -> Check:
    bounds = {key: value for key, value in (("min_value", low), ("max_value", high)) if value is not None}
    return Check(name, "expect_column_values_to_be_between", {"column": column, **bounds}, words)


def _among(name: str, column: str, values: list[Any] | tuple[Any, ...], words: str) -> Check:
    return Check(name, "expect_column_values_to_be_in_set", {"column": column, "value_set": list(values)}, words)


def _present(
    name: str, column: str, words: str, *, severity: Severity = CRITICAL, source: CheckSource = "law"
) -> Check:
    return Check(name, "expect_column_values_to_not_be_null", {"column": column}, words, severity, source)


def _unique(name: str, columns: list[str], words: str) -> Check:
    return Check(name, "expect_compound_columns_to_be_unique", {"column_list": columns}, words)


WAL: Final = (
    _between("ticks-increase", "tick_step", "time ticks strictly increase within a PChannel (law 2)", low=1),
    _unique("ids-unique", _ID, "each message id occurs once (law 3)"),
    _among("term-opened", "term_step", [0], "each message has the term that was opened last before it (law 5)"),
    _among("confirmed-not-ahead", "confirmed_ahead", [0], "no message precedes its LastConfirmed (law 4)"),
    _between("confirmed-advances", "confirmed_step", "LastConfirmed never goes back within a PChannel (law 4)", low=0),
    _between("tick-not-before-stamp", "tick_behind_ms", "no tick is older than its log stamp", high=0),
    _among("type-known", "type", TYPE_NAMES, "each message has a type that the chain knows"),
    _among("vchannel-of-pchannel", "foreign_vchannel", [0], "each VChannel lies on its PChannel"),
    _between("rows-counted", "rows", "row counts are not negative", low=0),
    _among("date-of-tick", "date_differs", [0], "each row lies in the partition of its tick's day"),
    _among("no-reason", "has_reason", [0], "an accepted message has no rejection reason"),
)
"""Checks of the messages of ``wal``."""

REJECTIONS: Final = (
    _present("reason-given", "reason", "each rejection has a reason (law 6)"),
    _among("reason-known", "reason", REASONS, "each reason is one of the documented ones"),
    _unique("ids-unique", _ID, "no message is rejected twice (law 3)"),
    _between("origin-known", "entry", "each rejection names the log entry it came from (law 6)", low=0),
    _between("stamp-known", "physical_ms", "each rejection has the log's stamp", low=1),
)
"""Checks of the rejections of ``wal``."""

CHANNELS: Final = (
    _among("messages-as-committed", "messages_missing", [0], "the WAL holds as many messages as its commits counted"),
    _among("rejections-as-committed", "rejections_missing", [0], "the WAL holds as many rejections as were counted"),
    _among("states-live", "states", [*range(1, MAX_INCREMENTS + 2)], "each PChannel has a snapshot and few increments"),
    _among("tick-as-committed", "tick_differs", [0], "the state has the tick of the last commit"),
)
"""Checks of one row per PChannel of ``wal``."""

SEGMENTS: Final = (
    _among("state-known", "state", SEGMENT_STATES, "each segment is in a known state"),
    _between("rows-counted", "rows", "row counts are not negative", low=0),
    _between("bytes-counted", "bytes", "byte counts are not negative", low=0),
    _between("ticks-in-order", "age_ticks", "no segment changes state before it was created", low=0),
    _between("ticks-positive", "created_tick", "ticks are positive", low=1),
    _unique(
        "states-once", ["pchannel", "segment_id", "state", "time_tick"], "each state change of a segment occurs once"
    ),
    _among("rows-as-stored", "rows_missing", [0], "a flushed segment has as many rows as its collection stores for it"),
)
"""Checks of the rows of ``segments``. `rows_missing` is null for segments whose rows were rewritten since."""

CHECKPOINTS: Final = (
    _among("one-checkpoint", "live_rows", [1, 2], "each PChannel has one checkpoint and perhaps its snapshot"),
    _between("tick-not-negative", "time_tick", "ticks are not negative", low=0),
    _between("not-ahead", "ahead_of_wal", "no checkpoint is ahead of the WAL", high=0),
    _between("confirmed-not-negative", "lc_entry", "LastConfirmed is a position in the log", low=0),
    _between("term-known", "term", "terms are not negative", low=0),
    _present("catalog-there", "catalog", "each checkpoint has its catalog"),
)
"""Checks of ``checkpoints``."""


def collection_suite(schema: CollectionSchema, partitions: list[int]) -> tuple[Check, ...]:
    """Return the suite that follows from a collection's schema and its partitions."""
    keys = list(schema.key_names)
    several = len(keys) > 1
    checks = [
        *(
            _present(
                f"key-present:{key}" if several else "key-present",
                key,
                "the primary key is never null",
                source="schema",
            )
            for key in keys
        ),
        # Duplicate keys are allowed (a reader then sees both rows), so this only warns.
        Check(
            "key-unique",
            "expect_compound_columns_to_be_unique" if several else "expect_column_values_to_be_unique",
            {"column_list": keys} if several else {"column": keys[0]},
            "the primary key is unique among the visible rows of the range",
            "warning",
            "schema",
        ),
        Check(
            "partition-known",
            "expect_column_values_to_be_in_set",
            {"column": "_partition_id", "value_set": sorted(partitions)},
            "each row lies in a partition of the collection",
            CRITICAL,
            "schema",
        ),
        _between("ticks-in-order", "write_lag_ticks", "no row is visible before it was written", low=0),
    ]
    for field in schema.fields:
        checks.extend(_of_field(field, keys))
    return tuple(checks)


def _of_field(field: FieldSpec, keys: Sequence[str]) -> list[Check]:
    found = []
    kind = _SPARK_TYPES.get(field.type)  # Great Expectations cannot compare the type names of decimals and nested types
    if kind is not None:
        words = f"{field.name} is a {field.type}"
        kwargs = {"column": field.name, "type_": kind}
        found.append(
            Check(f"type:{field.name}", "expect_column_values_to_be_of_type", kwargs, words, CRITICAL, "schema")
        )
    if not field.nullable and field.name not in keys:
        found.append(_present(f"present:{field.name}", field.name, f"{field.name} is never null", source="schema"))
    return found
