"""What a log server holds for strangers, for those that rest, and for those that ask too much."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyarrow import flight

from millrace.access.grants import Caller, Principal
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, ServerFull
from millrace.log.server.connections import ConnectionGuard, ConnectionLimits
from millrace.log.server.main import OUTPUT_BYTES
from millrace.rpc.discovery import ServerRecord, read_record
from millrace.rpc.launch import ServerLaunch
from millrace.rpc.link import AppendStream, ConnectionLost, Link, Watchdog
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.wire import typed_error
from tests.log.server_rig import PATIENCE, Rig
from tests.waiting import until

BODY = 600 << 20


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[[ConnectionLimits], Rig]]:
    made: list[Rig] = []

    def make(limits: ConnectionLimits) -> Rig:
        made.append(Rig(tmp_path, connections=limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerRecord]:
    with RemoteLogService.connect(tmp_path, launch=ServerLaunch(idle_timeout=120.0)) as service:
        record = read_record(tmp_path)
        assert record is not None
        yield record
        service.shutdown()


def _stranger(record: ServerRecord) -> tuple[flight.FlightClient, flight.FlightCallOptions]:
    return flight.FlightClient(record.address), flight.FlightCallOptions(
        headers=[(b"authorization", b"Bearer not-the-token")], timeout=60
    )


def _ask(kind: str, record: ServerRecord) -> None:
    client, options = _stranger(record)
    body = bytes(BODY)
    if kind == "action":
        list(client.do_action(flight.Action("ping", body), options))
    elif kind == "get":
        client.do_get(flight.Ticket(body), options).read_all()
    elif kind == "info":
        client.get_flight_info(flight.FlightDescriptor.for_command(body), options)
    else:
        batch = pa.record_batch([pa.array([body], pa.large_binary())], ["value"])
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b'{"append":"p0"}'), options)
        writer.begin(batch.schema)
        writer.write_batch(batch)
        reader.read_chunk()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["action", "get", "info", "exchange"])
def test_what_a_stranger_sends_is_not_held(kind: str, server: ServerRecord) -> None:
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    largest, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            largest[0] = max(largest[0], process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            _ask(kind, server)
    finally:
        done.set()
        watching.join()
    assert largest[0] - before < 64 << 20


def test_what_the_server_prints_stays_small(server: ServerRecord, tmp_path: Path) -> None:
    output = tmp_path / "server.log"
    with output.open("ab") as file:
        file.truncate(OUTPUT_BYTES + 1)
    until(lambda: output.with_name("server.log.1").exists() and output.stat().st_size < 1 << 16, "it is put aside")


def test_a_connection_without_a_token_is_shut_after_its_time_and_one_with_stays(
    rig: Callable[[ConnectionLimits], Rig],
) -> None:
    made = rig(ConnectionLimits(unauthenticated_seconds=0.3))
    log, _ = made.log()
    host, port = "127.0.0.1", made.server.port
    silent = [socket.create_connection((host, port)) for _ in range(20)]
    for each in silent:
        each.settimeout(PATIENCE)
    # gRPC greets each with its settings frame; then comes the end.
    assert all(_ends(each) for each in silent)
    assert log.append([b"still here"])
    assert made.server.connections.refused == 20
    until(lambda: len(made.server.connections) == 1, "only the client is left")


def test_there_are_no_more_connections_than_allowed_and_a_client_gets_in_through_a_flood(
    rig: Callable[[ConnectionLimits], Rig],
) -> None:
    made = rig(ConnectionLimits(connections=8, unauthenticated_seconds=PATIENCE))
    log, _ = made.log()
    flood = [socket.create_connection(("127.0.0.1", made.server.port)) for _ in range(40)]
    until(lambda: made.server.connections.refused >= 33, "what is too much is shut")
    assert len(made.server.connections) <= 8

    def gets_in() -> bool:
        with made.link() as link:
            try:
                return bool(link.act("ping", {}, timeout=PATIENCE)["pid"])
            except ConnectionLost:  # it was shut before its first call came
                return False

    until(gets_in, "a client gets in")
    assert log.append([b"the first client was not shut"])
    for each in flood:
        each.close()


def test_a_client_that_authenticated_before_its_connection_was_found_is_not_shut_for_a_flood() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        guard = ConnectionGuard(listener.getsockname()[1], ConnectionLimits(connections=3))

        def connected() -> socket.socket:
            client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=20))
            stack.enter_context(listener.accept()[0])
            return client

        known, *_ = [connected() for _ in range(7)]
        guard.welcome(f"ipv4:127.0.0.1:{known.getsockname()[1]}", Caller(Principal.admin("known")))
        guard._scan(time.monotonic())
        assert guard.refused == 4
        known.setblocking(False)
        with pytest.raises(BlockingIOError):
            known.recv(1)


def test_a_client_that_rests_keeps_the_server_from_being_idle(rig: Callable[[ConnectionLimits], Rig]) -> None:
    made = rig(ConnectionLimits())
    until(lambda: len(made.server.connections) == 1 and made.server.gate.idle_seconds > 0.1, "the client rests")
    assert made.server.idle_seconds == 0.0
    made.service.close()
    until(lambda: made.server.idle_seconds > 0.1, "the client has gone")


def test_the_connection_that_rests_makes_room_for_one_that_works(rig: Callable[[ConnectionLimits], Rig]) -> None:
    made = rig(ConnectionLimits(connections=2, idle_seconds=0.2))
    made.log()
    with made.link() as resting, made.link() as working:
        resting.act("ping", {}, timeout=PATIENCE)
        quiet_since = time.monotonic()
        # Until one rests, the third is shut as soon as it is seen, in the middle of a call or ahead of it.
        until(lambda: _answers(working) and time.monotonic() > quiet_since + 0.5, "rest")
        # The third is let in; the one that rests connects again when it wants something.
        assert working.act("ping", {}, timeout=PATIENCE)["pid"]
        assert made.server.connections.refused >= 1


def test_a_stream_too_many_is_refused_as_retriable_and_finds_room_behind_one_that_ends(
    rig: Callable[[ConnectionLimits], Rig],
) -> None:
    made = rig(ConnectionLimits(streams=2))
    made.log()
    with made.link() as link:
        streams = [AppendStream(link, "p0", pipelined=True) for _ in range(2)]
        deadline = Deadline.after(PATIENCE)
        for stream in streams:
            stream.send(pa.array([b"x"], pa.large_binary()), deadline=deadline)
            assert len(stream.receive(deadline=deadline)) == 1
        third = AppendStream(link, "p0", pipelined=True)
        with pytest.raises(ServerFull) as refused:
            third.receive(deadline=deadline)
        assert refused.value.retriable
        third.close()
        streams[0].close()

        def taken() -> bool:
            stream = AppendStream(link, "p0", pipelined=True)
            try:
                stream.send(pa.array([b"x"], pa.large_binary()), deadline=deadline)
                return len(stream.receive(deadline=deadline)) == 1
            except ServerFull:
                return False
            finally:
                stream.close()

        until(taken, "the stream that ended left room")
        streams[1].close()


def _answers(link: Link) -> bool:
    try:
        return bool(link.act("ping", {}, timeout=PATIENCE))
    except ConnectionLost:
        return False


def _ends(connection: socket.socket) -> bool:
    with connection:
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
    return True


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"pchannel": 7}', b'{"pchannel": "p0", "position": [1e300, 0]}']
    + [
        b'{"pchannel": "p0", "position": [0, 0], "%s": %s}' % (key, value)
        for key in (b"max_bytes", b"timeout")
        for value in (b'"x"', b"null", b"[]", b"-1", b"NaN", b"1e400", b"true")
    ],
)
def test_a_request_that_makes_no_sense_is_an_invalid_argument_and_no_failure_inside(
    rig: Callable[[ConnectionLimits], Rig], body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    made = rig(ConnectionLimits())
    made.log()
    with made.link() as link:
        with pytest.raises((flight.FlightError, pa.ArrowException)) as refused:
            link.client.do_get(flight.Ticket(body), link.options(PATIENCE)).read_all()
        assert isinstance(typed_error(refused.value), InvalidArgument)
    assert "failed unexpectedly" not in caplog.text


def test_to_look_for_connections_takes_no_lock_of_a_file_away(
    rig: Callable[[ConnectionLimits], Rig], tmp_path: Path
) -> None:
    """The kernel drops all of a process's locks on a file when any descriptor of it is closed.

    SQLite's and RocksDB's too.
    """
    held = tmp_path / "held"
    taken = f"import fcntl; fcntl.lockf(open({str(held)!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with held.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        made = rig(ConnectionLimits(unauthenticated_seconds=0.1))
        with socket.create_connection(("127.0.0.1", made.server.port)):
            until(lambda: made.server.connections.refused == 1, "all descriptors were looked at")
        assert subprocess.run([sys.executable, "-c", taken], stderr=subprocess.DEVNULL).returncode != 0


def test_a_connection_is_closed_once_no_call_is_being_started(server: ServerRecord) -> None:
    """Closing Flight's client destroys what a call that is being started uses."""
    watchdog = Watchdog()
    link = Link(server, watchdog)
    with link.calling() as client:
        link.close()
        assert list(client.do_action(flight.Action("ping", b"{}"), link.options(PATIENCE)))
    with pytest.raises(pa.ArrowInvalid):
        list(client.do_action(flight.Action("ping", b"{}"), link.options(PATIENCE)))
    with pytest.raises(ConnectionLost) as lost:
        link.act("ping", {}, timeout=PATIENCE)
    assert not lost.value.sent
    watchdog.close()
