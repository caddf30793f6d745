"""The log's server as a process: found, started once, started again, stopped cleanly, used by several processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    DataFolderCopied,
    EntryTooLarge,
    InvalidSettings,
    LogBusy,
    LogUnavailable,
    MillraceError,
    PositionTruncated,
)
from millrace.base.file_lock import exclusive_lock
from millrace.log.protocol import Log
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import EARLIEST, LogId
from millrace.rpc.discovery import (
    LOCK_FILE,
    RECORD_FILE,
    Liveness,
    ServerRecord,
    await_record,
    read_record,
    remove_record,
    running_server,
    write_record,
)
from millrace.rpc.launch import ServerLaunch
from millrace.rpc.link import AppendStream, ConnectionLost
from millrace.rpc.remote_log import RemoteLogService
from tests.prefork import started_as_by_users  # noqa: F401 - a fixture
from tests.processes import end_processes
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("started_as_by_users")

PATIENCE = 30.0
LAUNCH = ServerLaunch(idle_timeout=60.0, settings=(("segment_bytes", str(1 << 20)), ("max_entry_bytes", str(1 << 19))))

APPENDER = """
import sys
from millrace.rpc.remote_log import RemoteLogService
folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with RemoteLogService.connect(folder) as service:
    log = service.open("p0")
    for number in range(count):
        log.append([f"{name}-{number}-{part}".encode() for part in range(3)])
"""

READER = """
import sys
from millrace.rpc.remote_log import RemoteLogService
from millrace.message.ids import EARLIEST
folder, count = sys.argv[1], int(sys.argv[2])
position, seen = EARLIEST, []
with RemoteLogService.connect(folder) as service:
    log = service.open("p0")
    while len(seen) < count:
        entries = log.read(position, timeout=20)
        assert entries.batch.num_rows, "the entries stopped coming"
        seen += entries.batch.column("value").to_pylist()
        position = entries.next
sys.stdout.write(b",".join(seen).decode())
"""

STARTER = """
import sys
from millrace.rpc.discovery import ServerLaunch
from millrace.rpc.remote_log import RemoteLogService
with RemoteLogService.connect(sys.argv[1], launch=ServerLaunch(idle_timeout=60)) as service:
    sys.stdout.write(str(service.ping()["pid"]))
"""


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A log folder whose servers, those that wait for its lock included, are gone after the test."""
    yield tmp_path
    end_processes(tmp_path)


def server_of(folder: Path) -> ServerRecord:
    record = read_record(folder)
    assert record is not None
    return record


def kill(server: ServerRecord) -> None:
    living = Liveness(server)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not living.is_alive(), "the killed server is dead, with all its threads")
    living.close()


def everything(log: Log) -> list[bytes]:
    """All values of a log, which one read need not return at once."""
    position, values = EARLIEST, []
    while (entries := log.read(position)).batch.num_rows:
        values += entries.batch.column("value").to_pylist()
        position = entries.next
    return values


def test_the_server_starts_when_it_is_needed_and_goes_on_without_its_starter(folder: Path) -> None:
    with pytest.raises(LogUnavailable, match="start it with"):
        RemoteLogService.connect(folder, start=False)
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        assert service.open("p0").append([b"a"])[0].entry > 0
    record = server_of(folder)
    assert record.alive()
    assert os.getsid(record.pid) != os.getsid(0)
    with RemoteLogService.connect(folder, start=False) as service:
        assert service.ping()["pid"] == record.pid
        assert everything(service.open("p0")) == [b"a"]


def test_only_the_owner_may_read_the_token(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH):
        assert stat.S_IMODE((folder / RECORD_FILE).stat().st_mode) == 0o600
        assert len(server_of(folder).token) >= 40


def test_of_several_starters_one_starts_the_one_server(folder: Path) -> None:
    starters = [python(STARTER, folder) for _ in range(3)]
    answers = {starter.communicate(timeout=PATIENCE)[0] for starter in starters}
    assert answers == {str(server_of(folder).pid)}


@pytest.mark.slow
def test_several_processes_append_and_read_at_once(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        reader = python(READER, folder, 2 * 50 * 3)
        appenders = [python(APPENDER, folder, name, 50) for name in ("a", "b")]
        for appender in appenders:
            appender.communicate(timeout=PATIENCE)
            assert appender.returncode == 0
        seen = reader.communicate(timeout=PATIENCE)[0].split(",")
        assert reader.returncode == 0
        assert [value.decode() for value in everything(service.open("p0"))] == seen
    of: defaultdict[str, list[str]] = defaultdict(list)
    for value in seen:
        of[value[0]].append(value)
    assert dict(of) == {
        name: [f"{name}-{number}-{part}" for number in range(50) for part in range(3)] for name in ("a", "b")
    }
    # A batch is atomic: nothing of another process stands inside it.
    assert all(len({value.rsplit("-", 1)[0] for value in seen[at : at + 3]}) == 1 for at in range(0, len(seen), 3))


def test_a_killed_server_is_started_again_by_whoever_needs_it(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        first = log.append([b"a"])
        before = server_of(folder)
        kill(before)
        assert everything(log) == [b"a"]
        after = server_of(folder)
        assert (after.instance, after.token) != (before.instance, before.token)
        assert log.append([b"b"])[0] > first[0]


@pytest.mark.slow
def test_an_append_after_the_server_died_idle_is_not_in_doubt(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        with log.pipeline() as pipeline:
            pipeline.submit([b"a"]).result()
            log.append([b"b"])
            kill(server_of(folder))
            log.append([b"c"])
            kill(server_of(folder))
            pipeline.submit([b"d"]).result()
        assert everything(log) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("change", [{"pid": 2**22 - 1}, {"pid": os.getpid(), "started": 1e9}, {"pid": os.getpid()}])
def test_a_record_of_a_process_that_is_gone_or_another_one_is_not_believed(
    folder: Path, change: dict[str, float]
) -> None:
    stale = replace(ServerRecord.of_this_process("grpc://127.0.0.1:9"), started=5.0)
    write_record(folder, replace(stale, **change))  # type: ignore[arg-type]
    assert not server_of(folder).alive()
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        assert service.ping()["pid"] not in (os.getpid(), 2**22 - 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "address": 1}'])
def test_a_record_that_cannot_be_read_counts_as_none(folder: Path, text: str) -> None:
    (folder / RECORD_FILE).write_text(text)
    assert read_record(folder) is None


def test_a_zombie_is_not_a_living_server(folder: Path) -> None:
    child = python("import sys; sys.stdin.readline()")
    process = psutil.Process(child.pid)
    started = process.create_time() - psutil.boot_time()
    record = ServerRecord("grpc://127.0.0.1:9", child.pid, started, "x", "y")
    assert record.alive()
    child.kill()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE, "the child is a zombie")
    assert not record.alive()
    child.communicate(timeout=PATIENCE)


def test_a_server_whose_first_thread_has_ended_lives_until_the_others_have(folder: Path) -> None:
    child = python(
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start();"
        " ctypes.CDLL(None).pthread_exit(None)"
    )
    process = psutil.Process(child.pid)
    record = ServerRecord("grpc://127.0.0.1:9", child.pid, process.create_time() - psutil.boot_time(), "x", "y")
    watched = Liveness(record)
    until(lambda: process.status() == psutil.STATUS_ZOMBIE, "its first thread ends")
    assert record.alive(), "else a client starts another server beside it, or appends to it what it will never answer"
    assert watched.is_alive()
    child.kill()
    until(lambda: not watched.is_alive(), "all of it ends")
    assert not record.alive()
    watched.close()
    child.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_cleanly_with_clients_connected(folder: Path, number: signal.Signals) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        log.append([b"a"])
        record = server_of(folder)
        os.kill(record.pid, number)
        until(lambda: not record.alive(), "the server stops")
        assert read_record(folder) is None
        with RocksMQ(folder) as engine:
            assert everything(engine.open("p0")) == [b"a"]
        # The client goes on with a server of its own start.
        log.append([b"b"])
        assert server_of(folder).pid != record.pid


def test_appends_across_a_clean_stop_are_neither_lost_nor_in_doubt(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        sent: list[bytes] = []
        stopped = threading.Event()
        failures: list[MillraceError] = []

        def append() -> None:
            while not stopped.is_set() or len(sent) < 10:
                value = b"%d" % len(sent)
                try:
                    log.append([value])
                except MillraceError as error:
                    failures.append(error)
                    return
                sent.append(value)

        appending = threading.Thread(target=append)
        appending.start()
        until(lambda: len(sent) > 20, "appends go through")
        with RemoteLogService.connect(folder) as other:
            other.shutdown()
        so_far = len(sent)
        until(lambda: bool(failures) or len(sent) > so_far + 20, "appends go through to the next server")
        stopped.set()
        appending.join(PATIENCE)
        assert failures == []
        assert everything(log) == sent


def test_a_server_stops_by_itself_once_its_last_client_has_gone(folder: Path) -> None:
    launch = ServerLaunch(idle_timeout=0.5)
    with RemoteLogService.connect(folder, launch=launch) as service:
        service.create("p0")
        record = server_of(folder)
    until(lambda: not record.alive(), "nobody uses the server")
    assert not (folder / RECORD_FILE).exists()
    with RemoteLogService.connect(folder, launch=launch) as service:
        assert service.names() == ["p0"]


def test_a_server_whose_record_was_removed_writes_it_again(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        record = server_of(folder)
        (folder / RECORD_FILE).unlink()
        assert await_record(folder, seconds=PATIENCE) == record
        service.shutdown()
    assert await_record(folder, seconds=PATIENCE) is None


@pytest.mark.parametrize("how", ["removed", "moved", "its lock removed"])
def test_a_server_whose_folder_was_removed_stops_and_serves_no_other(folder: Path, how: str) -> None:
    place = folder / "log"
    with RemoteLogService.connect(place, launch=LAUNCH) as service:
        service.create("p0")
        service.open("p0").append([b"old"])
        former = server_of(place)
    if how == "removed":
        shutil.rmtree(place)
    elif how == "moved":
        place.rename(folder / "elsewhere")
    else:
        (place / LOCK_FILE).unlink()
    until(lambda: not former.alive(), "it has stopped", seconds=PATIENCE)
    with RemoteLogService.connect(place, launch=LAUNCH) as service:
        assert server_of(place) != former
        if how != "its lock removed":
            service.create("p0")
        log = service.open("p0")
        log.append([b"new"])
        assert everything(log) == [b"old"] * (how == "its lock removed") + [b"new"]


def test_a_folder_that_an_unknown_process_holds_is_busy_and_not_free(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    assert await_record(folder, seconds=0.05) is None
    assert not (folder / LOCK_FILE).exists(), "to look makes nothing"
    with exclusive_lock(folder / LOCK_FILE, deadline=Deadline.after(1.0)), pytest.raises(LogBusy, match="fuser"):
        await_record(folder, seconds=0.05)


def test_shutdown_stops_the_server_that_runs_not_the_one_that_was_known(folder: Path) -> None:
    with (
        RemoteLogService.connect(folder, launch=LAUNCH) as service,
        RemoteLogService.connect(folder, launch=LAUNCH) as other,
    ):
        known = server_of(folder)
        os.kill(known.pid, signal.SIGKILL)
        until(lambda: not known.alive(), "the server is gone")
        other.names()
        running = server_of(folder)
        assert running.pid != known.pid
        service.shutdown()
        assert not running.alive()
        service.shutdown()
        assert read_record(folder) is None, "none is started to be stopped"


def test_settings_of_the_launch_reach_the_log(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        log = service.open("p0")
        with pytest.raises(EntryTooLarge):
            log.append([bytes((1 << 19) + 1)])
        for _ in range(4):
            last = log.append([bytes(1 << 19)] * 2)[-1]
        assert log.truncate(last) > 0
        with pytest.raises(PositionTruncated) as caught:
            log.read(EARLIEST)
        assert LogId(*caught.value.earliest) == log.describe().begin > EARLIEST
        assert log.verify().first_bad is None
        assert log.enforce_retention(allowed=last) == 0


def test_what_keeps_a_server_from_starting_reaches_its_starter_typed(folder: Path) -> None:
    with pytest.raises(InvalidSettings, match="no_such_setting"):
        RemoteLogService.connect(folder, launch=ServerLaunch(settings=(("no_such_setting", "1"),)))
    with pytest.raises(InvalidSettings, match="nowhere:nothing"):
        RemoteLogService.connect(folder, launch=ServerLaunch(extensions=("nowhere:nothing",)))
    with RocksMQ(folder), pytest.raises(LogBusy):
        RemoteLogService.connect(folder, launch=ServerLaunch(settings=(("lock_wait", "0.1"),)))


def test_a_folder_has_one_server_whatever_its_record_says(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH):
        record = server_of(folder)
        with pytest.raises(LogBusy), exclusive_lock(folder / LOCK_FILE, deadline=Deadline.after(0)):
            pass
        (folder / RECORD_FILE).unlink()
        with RemoteLogService.connect(folder, deadline=PATIENCE) as other:
            assert other.ping()["pid"] == record.pid


def test_a_copied_folder_does_not_reach_the_server_of_the_original(folder: Path) -> None:
    original, copy = folder / "original", folder / "copy"
    original.mkdir()
    with RemoteLogService.connect(original, launch=LAUNCH) as service:
        service.create("p0")
        service.open("p0").append([b"before"])
        shutil.copytree(original, copy)
        for start in (True, False):
            with pytest.raises(DataFolderCopied, match="is a copy"):
                RemoteLogService.connect(copy, start=start, launch=LAUNCH)
        (copy / RECORD_FILE).unlink()  # what the error says to do
        with RemoteLogService.connect(copy, launch=LAUNCH) as own:
            assert own.ping()["pid"] != service.ping()["pid"]
            own.open("p0").append([b"in the copy"])
            assert everything(own.open("p0")) == [b"before", b"in the copy"]
            own.shutdown()
        assert everything(service.open("p0")) == [b"before"]
        assert service.ping()["pid"] == server_of(original).pid


def test_a_folder_copied_from_one_whose_server_ended_is_a_folder_like_others(folder: Path) -> None:
    original, copy = folder / "original", folder / "copy"
    original.mkdir()
    with RemoteLogService.connect(original, launch=LAUNCH):
        kill(server_of(original))
    shutil.copytree(original, copy)
    with RemoteLogService.connect(copy, launch=LAUNCH) as service:
        assert service.ping()["pid"] == server_of(copy).pid


def test_a_server_of_an_earlier_build_which_does_not_hold_its_record_is_known_by_its_lock(folder: Path) -> None:
    record = replace(ServerRecord.of_this_process("grpc://127.0.0.1:9"), holds=False)
    document = {name: value for name, value in asdict(record).items() if name != "holds"}
    (folder / RECORD_FILE).write_text(json.dumps(document))
    with exclusive_lock(folder / LOCK_FILE, deadline=Deadline.after(0)):
        assert running_server(folder) == record
    with pytest.raises(DataFolderCopied):
        running_server(folder)


def test_a_record_that_ends_while_it_is_looked_at_is_no_copy(folder: Path) -> None:
    record = ServerRecord.of_this_process("grpc://127.0.0.1:9")
    published = write_record(folder, record)
    assert running_server(folder) == record
    remove_record(folder, record)
    published.close()
    assert running_server(folder) is None
    child = python("import sys; sys.stdin.readline()")
    started = psutil.Process(child.pid).create_time() - psutil.boot_time()
    write_record(folder, replace(record, pid=child.pid, started=started)).close()
    child.kill()
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "the child is a zombie")
    assert running_server(folder) is None
    child.communicate(timeout=PATIENCE)


@pytest.mark.slow
def test_a_server_that_hangs_costs_a_client_its_deadline_and_no_more(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        service.open("p0").append([b"a"])
        assert everything(service.open("p0")) == [b"a"]  # what the server loads at its first read is loaded
    with RemoteLogService.connect(folder, deadline=0.7) as service:
        log = service.open("p0")
        pid = server_of(folder).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            before = time.monotonic()
            with pytest.raises(LogUnavailable):
                log.append([b"b"])
            with pytest.raises(LogUnavailable):
                log.read(EARLIEST)
            assert time.monotonic() - before < 5.0
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: works(lambda: log.append([b"c"])), "the server answers again")
        found = everything(log)
        assert found.count(b"a") == 1
        assert found.count(b"b") <= 1


def test_who_waits_for_a_server_that_sleeps_goes_on_at_once_when_the_connection_is_given_up(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        service.create("p0")
        link = service.link(Deadline.after(20))
        service.open("p0").append([b"a"])
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                with link.stream("p0") as stream:
                    stream.send(pa.array([b"b"], pa.large_binary()), deadline=Deadline.after(60))
                    stream.receive(deadline=Deadline.after(60))
            except ConnectionLost as error:
                failures.append(error)

        pid = server_of(folder).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(0.3)  # it is on its way, and nobody answers
            link.close()
            waiting.join(20)
            assert not waiting.is_alive()
            assert failures
            with pytest.raises(ConnectionLost) as raised:
                AppendStream(link, "p0", pipelined=False)
            assert not raised.value.sent
        finally:
            os.kill(pid, signal.SIGCONT)


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except LogUnavailable:
        return False
    return True


def test_the_record_is_json_that_names_the_process(folder: Path) -> None:
    with RemoteLogService.connect(folder, launch=LAUNCH) as service:
        document = json.loads((folder / RECORD_FILE).read_text())
        assert document["pid"] == service.ping()["pid"]
        assert document["address"].startswith("grpc://127.0.0.1:")
