"""The tables of a deployment elsewhere, as its server gives them to a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa

from millrace.base.errors import NotSupportedRemotely
from millrace.catalog.collection import Collection
from millrace.client.append_client import AppendClient
from millrace.rpc.selection import Selection

if TYPE_CHECKING:
    from millrace.client.consume.delivery import Imports
    from millrace.client.consume.positions import Positions
    from millrace.client.consume.scan import History


class TablesServed:
    """Reads through the server (the protocol Tables of millrace.client.client)."""

    def __init__(self, append: AppendClient) -> None:
        self._append = append

    def history(self) -> History | None:
        _refuse("scan the WAL's table, or consume")

    def imports(self) -> Imports:
        _refuse("consume the rows of imports")

    def positions(self) -> Positions:
        _refuse("keep a consumer group's positions")

    def read(self, collection: Collection, *, at: int | None, seconds: float, selection: Selection) -> pa.Table:
        """The whole answer, in memory here; the server holds a piece of it at a time."""
        with self._append.read(collection, at=at, seconds=seconds, selection=selection) as rows:
            return rows.read_all()

    def stream(
        self, collection: Collection, *, at: int | None, seconds: float, selection: Selection
    ) -> pa.RecordBatchReader:
        return self._append.read(collection, at=at, seconds=seconds, selection=selection)

    def count(self, collection: Collection, *, at: int | None, seconds: float, where: str | None) -> int:
        return self._append.count(collection, at=at, seconds=seconds, where=where)


def _refuse(what: str) -> NoReturn:
    raise NotSupportedRemotely(
        f"a client of a server elsewhere cannot {what} yet: the files lie on the server's host; do it there"
    )
