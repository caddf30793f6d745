"""Answers of a server that break off.

What a client resumes comes once, and what it cannot resume is no whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import LogUnavailable
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_client import AppendClient
from millrace.client.remote_tables import read_import
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc.link import ConnectionLost
from millrace.rpc.selection import ALL_ROWS

ROWS = pa.schema([("id", pa.int64())])
USERS = CollectionInfo(
    id=1,
    name="users",
    state="active",
    vchannels=("p0_1v0",),
    schemas=(CollectionSchema((FieldSpec("id", "int64", False),), "id"),),
    partitions={"_default": 1},
    next_partition=2,
)

Part = tuple[pa.RecordBatch, dict[str, Any] | None]


class Server:
    """A service and its link at once.

    Answers `total` rows in batches of two, and breaks off after some batches, once for each of `breaks`.
    """

    deadline = 10.0

    def __init__(self, total: int, breaks: list[tuple[int, bool]]) -> None:
        self._total = total
        self._breaks = breaks
        """(batches that come, whether the stream then ends as if it were whole)"""
        self.links_dropped = 0

    def link(self, deadline: object) -> Server:
        return self

    def check(self) -> None: ...

    def drop_link(self, link: object) -> None:
        self.links_dropped += 1

    def call_with_retry(self, call: Callable[[Any, Any], Any], *, seconds: float) -> Any:
        return call(self, None)

    def parts(self, request: dict[str, Any], *, timeout: float) -> tuple[pa.Schema, Iterator[Part]]:
        return ROWS, self._answer(int(request.get("skip", 0)))

    def _answer(self, skip: int) -> Iterator[Part]:
        batches, clean = self._breaks.pop(0) if self._breaks else (self._total, None)
        for number, start in enumerate(range(skip, self._total, 2)):
            if number == batches:
                if clean:
                    return
                raise ConnectionLost("the connection was reset")
            rows = range(start, min(start + 2, self._total))
            yield pa.record_batch({"id": list(rows)}, schema=ROWS), None
        yield pa.record_batch({"id": []}, schema=ROWS), {"rows": self._total}


def client_of(server: Server) -> AppendClient:
    return AppendClient(server)  # type: ignore[arg-type]


@pytest.mark.parametrize("clean", [False, True], ids=["with an error", "as if it were whole"])
def test_an_import_that_breaks_off_goes_on_after_the_rows_that_came(clean: bool) -> None:
    server = Server(11, [(2, clean), (0, clean), (1, clean)])
    found = [key for rows, _ in read_import(server, "p0", 7) for key in rows["id"].to_pylist()]
    assert found == list(range(11))


def test_an_import_that_never_goes_on_is_an_error_that_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "deadline", 0.3)
    found: list[int] = []
    answer = read_import(Server(11, [(2, False), *[(0, False)] * 100]), "p0", 7)
    with pytest.raises(LogUnavailable, match="after 4 rows"):
        found.extend(key for rows, _ in answer for key in rows["id"].to_pylist())
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("batches", [0, 1, 3])
@pytest.mark.parametrize("clean", [False, True], ids=["with an error", "as if it were whole"])
def test_a_read_that_breaks_off_is_never_taken_as_whole(batches: int, clean: bool) -> None:
    server = Server(7, [(batches, clean)])
    with pytest.raises(LogUnavailable, match="broke off"):
        client_of(server).read(USERS, at=None, seconds=1.0, selection=ALL_ROWS).read_all()
    again = client_of(server).read(USERS, at=None, seconds=1.0, selection=ALL_ROWS).read_all()
    assert again["id"].to_pylist() == list(range(7))
