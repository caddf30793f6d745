"""The meta stores on real servers that fail.

Killed, compacted, suspended in the midst of a write, and answers that get lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidSettings, LeaseNotFound, MetaAmbiguous, MetaUnavailable, UnsupportedVersion
from millrace.base.settings import Settings
from millrace.brokers.etcd import EtcdServer
from millrace.brokers.mariadb import DATABASE, MariaDbServer
from millrace.brokers.server import LocalServer
from millrace.coord.assignment_source import MetaStoreAssignmentSource
from millrace.coord.channels.record import CHANNEL_PREFIX, AssignmentState, ChannelRecord, Owner
from millrace.meta.factory import ClosableMetaStore, open_meta_store
from millrace.meta.sql import SqlStore
from millrace.meta.sql_engine import IDLE_SECONDS, mariadb_engine, transaction, upgrade_exclusively
from millrace.meta.store import Entry, Put, RevisionEquals
from millrace.rpc.assignments import AssignmentCache
from tests import running_brokers
from tests.meta.stores import new_database

SECONDS = 30.0


def opened(server: LocalServer, *, address: str = "", database: str = DATABASE) -> ClosableMetaStore:
    """The store on `server`, at another address where a proxy stands before it."""
    url = server.url.replace(server.address, address or server.address).replace(f"/{DATABASE}", f"/{database}")
    env = server.credentials.environment() if isinstance(server, MariaDbServer) else {}
    return open_meta_store(url, time.monotonic, env=env)


@pytest.fixture(params=["etcd", "mariadb"])
def running(request: pytest.FixtureRequest) -> tuple[LocalServer, str]:
    """The run's server, and a database of this test's own."""
    if request.param == "etcd":
        return running_brokers.etcd(), DATABASE
    server = running_brokers.mariadb()
    return server, new_database(server)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EtcdServer, MariaDbServer])
def test_a_server_that_was_killed_goes_on_with_all_that_it_acknowledged(
    kind: Callable[..., LocalServer], tmp_path: Path
) -> None:
    with kind(tmp_path, settings=Settings()).start() as server, opened(server) as store:
        lease = store.grant(SECONDS)
        revision = store.commit([Put("a", b"1"), Put("node", b"", lease)])
        assert revision is not None
        server.kill()
        with pytest.raises(MetaUnavailable):
            store.get("a")
        with pytest.raises((MetaUnavailable, MetaAmbiguous)):
            store.commit([Put("b", b"2")])
        server.start()
        deadline = Deadline.after(SECONDS)

        def answers() -> bool:
            try:
                store.renew(lease)
            except MetaUnavailable:
                return False
            return True

        assert poll_until(answers, deadline, interval=0.05)  # the same store, not opened again
        assert [entry.modified for entry in store.list("").entries] == [revision, revision]
        assert store.changes("", after=revision).events == ()
        assert (
            store.commit([Put("b", b"2")], when=[RevisionEquals("a", revision), RevisionEquals("b", 0)]) == revision + 1
        )


class Proxy:
    """Stands before a server.

    Once armed, it lets a request through that has `mark` in it, and cuts the line at its answer.
    """

    def __init__(self, server: LocalServer, mark: bytes) -> None:
        self._server, self._mark = server.port["client"], mark
        self.armed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server))
            self._open += [client, server]
            cut = threading.Event()
            for source, target, asks in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(source, target, asks, cut))
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, target: socket.socket, asks: bool, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while said := source.recv(1 << 16):
                if asks and self.armed.is_set() and self._mark in said:
                    cut.set()
                if not asks and cut.is_set():
                    break
                target.sendall(said)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SECONDS)
        for each in self._open:
            each.close()


@pytest.fixture
def proxy(running: tuple[LocalServer, str]) -> Iterator[Proxy]:
    proxy = Proxy(running[0], b"/v3/kv/txn" if running[0].url.startswith("etcd") else b"\x03COMMIT")  # a query of this
    yield proxy
    proxy.close()


def test_a_commit_whose_answer_was_lost_is_ambiguous_and_reading_tells(
    running: tuple[LocalServer, str], proxy: Proxy
) -> None:
    server, database = running
    with opened(server, address=proxy.address, database=database) as store:
        first = store.commit([Put("lost", b"1")])
        assert first is not None
        proxy.armed.set()
        with pytest.raises(MetaAmbiguous, match="read before you retry"):
            store.commit([Put("lost", b"2")], when=[RevisionEquals("lost", first)])
        proxy.armed.clear()
        entry = store.get("lost")
        assert entry is not None
        assert entry.value == b"2"  # it stands; who repeats it with his condition does nothing
        assert store.commit([Put("lost", b"2")], when=[RevisionEquals("lost", first)]) is None


def test_a_server_that_is_not_there_is_unavailable_and_nothing_was_done(tmp_path: Path) -> None:
    for url in ("etcd://127.0.0.1:1", "etcds://127.0.0.1:1/prefix", "mariadb://127.0.0.1:1/d"):
        with pytest.raises(MetaUnavailable, match=r"127\.0\.0\.1.*nothing was done"):
            open_meta_store(url, time.monotonic, env={})


@pytest.mark.parametrize("url", ["etcd://h:1?user=x", "etcd://h:1/a?ca=/x&b=1", "postgresql://h/d", "etcd:h:1"])
def test_an_address_of_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidSettings):
        open_meta_store(url, time.monotonic, env={})
    with pytest.raises(InvalidSettings):
        Settings.load(env={"MILLRACE_META_STORE": url})


@pytest.mark.parametrize("url", ["mariadb://me:secret@h:1/d", "etcd://me:secret@h:1"])
def test_a_password_in_the_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(env={"MILLRACE_META_STORE": url})
    assert "secret" not in str(caught.value)


def test_a_follower_of_an_etcd_that_was_compacted_takes_everything_anew() -> None:
    server = running_brokers.etcd()
    with open_meta_store(f"{server.url}/compacted", time.monotonic, env={}) as store:
        follower = AssignmentCache(MetaStoreAssignmentSource(store))
        follower.refresh()

        def assign(pchannel: str, term: int) -> int:
            record = ChannelRecord(
                pchannel, "append", AssignmentState.ASSIGNED, term=term, owner=Owner(f"s{term}", "here:1", term)
            )
            revision = store.commit([Put(f"{CHANNEL_PREFIX}{pchannel}/append", record.encode())])
            assert revision is not None
            return revision

        for term in range(1, 4):
            assign("a", term)
        newest = assign("b", 1)
        store.compact(newest)
        assign("b", 2)
        follower.refresh()
        assert [(each.pchannel, each.term) for each in follower.known()] == [("a", 3), ("b", 2)]
        assign("a", 4)
        follower.refresh()  # and goes on by changes
        assert [(each.pchannel, each.term) for each in follower.known()] == [("a", 4), ("b", 2)]


@pytest.mark.slow
def test_a_writer_that_was_suspended_in_the_midst_keeps_nobody_from_writing() -> None:
    """On MariaDB the row of turns is given back; on SQLite it is not (docs/coordinator.md)."""
    server = running_brokers.mariadb()
    database = new_database(server)
    username, password = server.credentials
    with (
        opened(server, database=database) as store,
        pymysql.connect(
            host="127.0.0.1",
            port=server.port["client"],
            user=username,
            password=password,
            database=database,
            init_command="set idle_transaction_timeout=2",
        ) as sleeper,
        sleeper.cursor() as cursor,
    ):
        cursor.execute("select id from meta_state for update")
        cursor.execute("update meta_state set revision = 77")
        assert store.commit([Put("a", b"")]) == 1
        with pytest.raises(pymysql.err.OperationalError):
            cursor.execute("select 1")


class Ending:
    """Ends a MariaDB store's connection at the server before one of its next statements, once."""

    def __init__(self, server: MariaDbServer, engine: sa.Engine) -> None:
        username, password = server.credentials
        self._admin = pymysql.connect(host="127.0.0.1", port=server.port["client"], user=username, password=password)
        self.left = 0
        """Statements until then. 0: never, or it is done."""
        sa.event.listen(engine, "before_cursor_execute", self._before)

    def _before(self, _connection: object, cursor: Any, *_: object) -> None:
        self.left -= self.left > 0
        if self.left == 1:
            self.left = 0
            with self._admin.cursor() as admin:
                admin.execute(f"kill connection {cursor.connection.thread_id()}")

    def close(self) -> None:
        self._admin.close()


@pytest.mark.parametrize("statement", range(1, 7))
def test_a_call_whose_connection_the_server_ended_takes_effect_once(statement: int) -> None:
    """At each of its statements: at the first, the connection ended in the pool."""
    server = running_brokers.mariadb()
    database = new_database(server)
    with opened(server, database=database) as store:
        assert isinstance(store, SqlStore)
        lease = store.grant(SECONDS)
        assert store.commit([Put("a", b"1"), Put("b", b"1", lease)]) == 1
        with contextlib.closing(Ending(server, store._engine)) as ending:
            calls: list[tuple[Callable[[], object], object]] = [
                (lambda: store.commit([Put("a", b"2")], when=[RevisionEquals("a", 1)]), 2),
                (lambda: store.commit([Put("a", b"3")], when=[RevisionEquals("a", 1)]), None),
                (lambda: store.get("a"), Entry("a", b"2", 1, 2, 0)),
                (lambda: [each.key for each in store.list("").entries], ["a", "b"]),
                (lambda: [each.key for each in store.changes("", after=1).events], ["a"]),
                (lambda: store.grant(SECONDS), lease + 1),
                (lambda: store.renew(lease), None),
                (lambda: store.compact(1), None),
                (lambda: store.revoke(lease), None),
                (lambda: store.list("").revision, 3),
            ]
            for call, result in calls:
                ending.left = 1 + statement
                assert call() == result
                ending.left = 0


def test_a_server_that_ends_each_connection_is_unavailable() -> None:
    server = running_brokers.mariadb()
    with opened(server, database=new_database(server)) as store:
        assert isinstance(store, SqlStore)
        with contextlib.closing(Ending(server, store._engine)) as ending:
            sa.event.listen(store._engine, "connect", lambda *_: setattr(ending, "left", 2))
            ending.left = 2
            with pytest.raises(MetaUnavailable, match="nothing was done"):
                store.get("a")


def test_tables_are_made_though_the_server_ends_the_connection_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with a process that stands still on a busy machine."""
    server = running_brokers.mariadb()
    made: list[Ending] = []
    statements = iter([3, 9, 15])

    def engine(*arguments: str) -> sa.Engine:
        found = mariadb_engine(*arguments)
        made.append(Ending(server, found))
        made[-1].left = next(statements)
        return found

    monkeypatch.setattr("millrace.meta.sql.mariadb_engine", engine)
    for _ in range(3):
        with opened(server, database=new_database(server)) as store:
            assert store.get("a") is None
        made[-1].close()


@pytest.mark.slow
def test_a_process_that_stood_still_in_a_transaction_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = running_brokers.mariadb()
    with opened(server, database=new_database(server)) as store:
        assert isinstance(store, SqlStore)
        stops = iter([0.0, IDLE_SECONDS + 1.0])

        def stop(*_: object) -> None:
            time.sleep(next(stops, 0.0))

        sa.event.listen(store._engine, "after_cursor_execute", stop)
        assert store.commit([Put("a", b"1")], when=[RevisionEquals("a", 0)]) == 1
        assert next(stops, None) is None, "it stood still"


def test_tables_that_were_made_in_part_are_completed_and_a_newer_builds_are_left_alone() -> None:
    """MariaDB keeps what a migration did until it was killed."""
    server = running_brokers.mariadb()
    database = new_database(server)
    username, password = server.credentials

    def run(*statements: str) -> None:
        with (
            pymysql.connect(
                host="127.0.0.1",
                port=server.port["client"],
                user=username,
                password=password,
                database=database,
                autocommit=True,
            ) as db,
            db.cursor() as cursor,
        ):
            for statement in statements:
                cursor.execute(statement)

    with opened(server, database=database) as store:
        assert store.commit([Put("a", b"")]) == 1
    run("delete from meta_version", "drop table meta_lease", "drop index meta_history_modified on meta_history")
    with opened(server, database=database) as store:
        assert store.commit([Put("a", b"", store.grant(SECONDS))]) == 2
    run("update meta_version set version_num = '9999'")
    with pytest.raises(UnsupportedVersion, match="9999"):
        opened(server, database=database)


def test_processes_that_open_a_new_database_at_once_make_its_tables_once() -> None:
    server = running_brokers.mariadb()
    database = new_database(server)
    failures: list[BaseException] = []

    def use(name: str) -> None:
        try:
            with opened(server, database=database) as store:
                assert store.commit([Put(name, b"")]) is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(f"k{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failures
    with opened(server, database=database) as store:
        assert store.list("").revision == 4


def test_who_waits_to_make_the_tables_finds_what_the_one_before_has_made() -> None:
    server = running_brokers.mariadb()
    database = new_database(server)
    engine = mariadb_engine(f"mariadb://{server.address}/{database}", *server.credentials)
    try:
        with transaction(engine, read_only=True) as db:
            upgrade_exclusively(db)
            with opened(server, database=database) as store:  # the first one has not gone on yet
                assert store.list("").revision == 0
    finally:
        engine.dispose()


def test_a_lease_of_mariadb_ends_by_who_watches_it() -> None:
    server = running_brokers.mariadb()
    with opened(server, database=new_database(server)) as store:
        lease = store.grant(0.3)
        store.commit([Put("node", b"", lease)])
        assert poll_until(lambda: store.get("node") is None, Deadline.after(SECONDS), interval=0.05)
        with pytest.raises(LeaseNotFound):
            store.renew(lease)
