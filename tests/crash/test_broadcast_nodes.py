"""Broadcasts in a cluster whose nodes take the appends, with etcd as the meta store, while processes are killed.

Each broadcast is whole, in the name of who asked for it, and in the order of its VChannels.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.access.grants import Grant, Role
from millrace.access.token_file import TokenFile
from millrace.base.deadline import Deadline
from millrace.base.errors import MillraceError
from millrace.catalog.broadcast import BroadcastResult
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.definition import ingest_to_end
from millrace.observe.broadcasts import broadcast_rows
from millrace.observe.observer import Observer
from millrace.observe.wal_search import WalQuery
from millrace.rpc.discovery import read_record
from tests.crash.test_cluster_moves import WAIT, appending_nodes, on_kafka, until

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("round", "int64", False)), "id")
ROWS = 40


class Caster(threading.Thread):
    """Broadcasts rows to all VChannels until it is stopped, and repeats what it got no answer for."""

    def __init__(self, client: Database) -> None:
        super().__init__(name="caster", daemon=True)
        self._client = client
        self._ended = threading.Event()
        self.results: list[BroadcastResult] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self.results.append(self._cast(len(self.results)))
                if len(self.results) % 5 == 0:
                    name = f"p{len(self.results)}"
                    self._client.catalog.create_partition("notes", name, request=name)
        except BaseException as error:
            self.failure = error

    def _cast(self, number: int) -> BroadcastResult:
        deadline = Deadline.after(WAIT)
        ids = list(range(number * ROWS, (number + 1) * ROWS))
        while True:
            sent = self._client.broadcast(request=f"cast-{number}")
            sent.insert("notes", pa.table({"id": ids, "round": [number] * ROWS}))
            try:
                return sent.submit()
            except MillraceError as error:
                if not error.retriable or not deadline.pause(0.1):
                    raise

    def stop(self) -> None:
        self._ended.set()
        self.join(2 * WAIT)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_broadcasts_through_nodes_that_are_killed_are_whole_and_name_who_asked(tmp_path: Path) -> None:
    with appending_nodes(tmp_path, on_kafka()) as (settings, machine, _, cluster, _):
        machine.catalog.create_collection("notes", SCHEMA, vchannels=4)
        token, _ = TokenFile(settings.data_dir).add("ada", [Grant(Role.ADMIN)])
        record = read_record(settings.log_path)
        assert record is not None
        with connect(record.address, token=token, settings=replace(settings, append_retry_delay=0.05)) as client:
            caster = Caster(client)
            caster.start()

            def more(count: int) -> None:
                wanted = len(caster.results) + count
                until(lambda: caster.failure is not None or len(caster.results) >= wanted, cluster)

            try:
                more(6)
                cluster.jobs.pop("n1").kill()
                more(6)
                cluster.node("n1")
                cluster.jobs.pop("c1").kill()
                cluster.coordinator()
                more(3)
                cluster.wait_owned({"n1", "n2"}, pchannels=4, deadline=WAIT)
                cluster.jobs.pop("n2").kill()
                more(6)
                cluster.node("n2")
            finally:
                caster.stop()
            assert caster.failure is None, caster.failure
        until(lambda: not any(each.open for each in broadcast_rows(settings, limit=200)), cluster)
        notes = machine.definition("notes")
        changes = [batch.rows for batch in machine["notes"].changes(until=machine.current_tick(notes.pchannels))]
        rows = [row for batch in changes for row in batch.to_pylist()]
        assert sorted(row["id"] for row in rows) == list(range(len(caster.results) * ROWS))
        for number, result in enumerate(caster.results):
            mine = {(row["_vchannel"], row["_time_tick"]) for row in rows if row["round"] == number}
            assert mine == set(result.ticks.items())
        for one, other in zip(caster.results, caster.results[1:], strict=False):
            assert all(one.ticks[vchannel] < other.ticks[vchannel] for vchannel in one.ticks.keys() & other.ticks)
        assert {vchannel for each in caster.results for vchannel in each.ticks} == set(notes.vchannels)
        ingest_to_end(settings, machine.log)
        look = Observer(settings)
        for kind in ("INSERT", "CREATE_PARTITION"):
            query = WalQuery("message", collection_id=notes.id, types=(kind,))
            assert {each.principal for each in look.messages(query).items} == {"ada"}, kind
