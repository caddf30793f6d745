"""Millrace: a streaming write-ahead log for tables.

    import millrace

    with millrace.connect() as db:
        users = db.create_collection("users", {"id": "int64", "name": "string?"}, key="id", exist_ok=True)
        users.upsert([{"id": 1, "name": "Ada"}])
        print(users.to_pandas())

The names below are the public API (docs/api.md), with :mod:`millrace.spark` for Spark and :mod:`millrace.testing` for
tests. Everything else is internal and may change without notice. Names are loaded lazily: ``import millrace`` alone
imports nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.base import errors as errors
    from millrace.base.errors import MillraceError as MillraceError
    from millrace.base.settings import Settings as Settings
    from millrace.client.collection import Collection as Collection
    from millrace.client.consume.async_consumer import AsyncConsumer as AsyncConsumer
    from millrace.client.consume.changes import ChangeStream as ChangeStream
    from millrace.client.consume.consumer import Consumer as Consumer
    from millrace.client.consume.delivery import Change as Change
    from millrace.client.consume.delivery import Delivery as Delivery
    from millrace.client.consume.parallel_consumer import ParallelConsumer as ParallelConsumer
    from millrace.client.database import Database as Database
    from millrace.client.database import connect as connect
    from millrace.client.produce.async_producer import AsyncProducer as AsyncProducer
    from millrace.client.produce.batch_appender import BatchLimits as BatchLimits
    from millrace.client.produce.broadcast import Broadcast as Broadcast
    from millrace.client.produce.producer import Producer as Producer
    from millrace.client.produce.transaction import Transaction as Transaction
    from millrace.client.produce.written import Written as Written
    from millrace.client.schemas import schema as schema
    from millrace.message.schema import CollectionSchema as Schema
    from millrace.message.schema import FieldSpec as Field
    from millrace.streams.patterns.builder import permute as permute
    from millrace.streams.patterns.builder import row as row
    from millrace.streams.patterns.table import match_recognize as match_recognize
    from millrace.streams.sourcing.aggregate import Aggregate as Aggregate
    from millrace.streams.sourcing.events import EventTypes as EventTypes
    from millrace.streams.sourcing.groups import Command as Command
    from millrace.streams.sourcing.store import EventStore as EventStore
    from millrace.wal.scanner import All as All
    from millrace.wal.scanner import Latest as Latest
    from millrace.wal.scanner import StartAfter as StartAfter
    from millrace.wal.scanner import StartAfterTick as StartAfterTick
    from millrace.wal.scanner import StartFrom as StartFrom

from millrace.base.package import VERSION as __version__

_FACE = {
    "Aggregate": "millrace.streams.sourcing.aggregate",
    "AsyncConsumer": "millrace.client.consume.async_consumer",
    "AsyncProducer": "millrace.client.produce.async_producer",
    "All": "millrace.wal.scanner",
    "BatchLimits": "millrace.client.produce.batch_appender",
    "Broadcast": "millrace.client.produce.broadcast",
    "Change": "millrace.client.consume.delivery",
    "ChangeStream": "millrace.client.consume.changes",
    "Collection": "millrace.client.collection",
    "Command": "millrace.streams.sourcing.groups",
    "Consumer": "millrace.client.consume.consumer",
    "Database": "millrace.client.database",
    "Delivery": "millrace.client.consume.delivery",
    "EventStore": "millrace.streams.sourcing.store",
    "EventTypes": "millrace.streams.sourcing.events",
    "Field": "millrace.message.schema:FieldSpec",
    "Latest": "millrace.wal.scanner",
    "MillraceError": "millrace.base.errors",
    "ParallelConsumer": "millrace.client.consume.parallel_consumer",
    "Producer": "millrace.client.produce.producer",
    "Schema": "millrace.message.schema:CollectionSchema",
    "Settings": "millrace.base.settings",
    "StartAfter": "millrace.wal.scanner",
    "StartAfterTick": "millrace.wal.scanner",
    "StartFrom": "millrace.wal.scanner",
    "Transaction": "millrace.client.produce.transaction",
    "Written": "millrace.client.produce.written",
    "connect": "millrace.client.database",
    "errors": "millrace.base",
    "match_recognize": "millrace.streams.patterns.table",
    "permute": "millrace.streams.patterns.builder",
    "row": "millrace.streams.patterns.builder",
    "schema": "millrace.client.schemas",
}

__all__ = [
    "__version__",
    "Aggregate",
    "All",
    "AsyncConsumer",
    "AsyncProducer",
    "BatchLimits",
    "Broadcast",
    "Change",
    "ChangeStream",
    "Collection",
    "Command",
    "connect",
    "Consumer",
    "Database",
    "Delivery",
    "errors",
    "EventStore",
    "EventTypes",
    "Field",
    "Latest",
    "match_recognize",
    "MillraceError",
    "ParallelConsumer",
    "permute",
    "Producer",
    "row",
    "Schema",
    "schema",
    "Settings",
    "StartAfter",
    "StartAfterTick",
    "StartFrom",
    "Transaction",
    "Written",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    module, _, other = _FACE[name].partition(":")
    found = import_module(f"{module}.{name}") if name == "errors" else getattr(import_module(module), other or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
