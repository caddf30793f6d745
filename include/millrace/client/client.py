"""Deprecated name of a database's connection; :mod:`millrace.client.database` replaces it in the next release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Self

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.changes import ChangeStream
from millrace.client.consume.consumer import Consumer
from millrace.client.database import Database
from millrace.client.dataset import CollectionDataset
from millrace.client.produce.producer import Producer
from millrace.rpc.wire import TOKEN_VARIABLE


class Client(Closeable):
    """Deprecated: the methods of :class:`Database` and :class:`Collection` under the names of the last release."""

    def __init__(self, database: Database) -> None:
        warnings.warn(
            "millrace.client.client.Client goes with the next release: use millrace.connect() and the Database",
            DeprecationWarning,
            stacklevel=3,
        )
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    @classmethod
    def connect(cls, settings: Settings | None = None, *, start: bool = True, now: bool = True) -> Self:
        return cls(Database.in_folder(settings or Settings.load(), start=start, eager=now))

    @classmethod
    def at(cls, address: str, *, env: Mapping[str, str] | None = None, token: str = "", **options: Any) -> Self:
        if env is not None:
            token = token or env.get(TOKEN_VARIABLE, "")
            options.setdefault("settings", Settings.load(env=env))
        return cls(Database.at_server(address, token=token, **options))

    def close(self) -> None:
        self._database.close()

    def collection(self, name: str) -> CollectionInfo:
        return self._database.definition(name)

    def current_definition(self, source: str | CollectionInfo) -> CollectionInfo:
        return self._database.definition(source)

    def producer(self, **options: Any) -> Producer:
        return self._database.new_producer(**options)

    def consumer(self, source: Any, *, policy: Any = None, until_tick: int | None = None, **options: Any) -> Consumer:
        return self._database.consumer(source, start=policy, until=until_tick, **options)

    def changes(self, source: str | CollectionInfo, *, until_tick: int | None = None, **options: Any) -> ChangeStream:
        return self._database.collection(source).changes(until=until_tick, **options)

    def read(self, source: str | CollectionInfo, **options: Any) -> pa.Table:
        return self._database.collection(source).read(**options)

    def stream(self, source: str | CollectionInfo, **options: Any) -> pa.RecordBatchReader:
        return self._database.collection(source).stream(**options)

    def dataset(self, source: str | CollectionInfo, **options: Any) -> CollectionDataset:
        return self._database.collection(source).dataset(**options)

    def count(self, source: str | CollectionInfo, **options: Any) -> int:
        return self._database.collection(source).count(**options)
