"""What the registry of message streams' channels promises (millrace.msgstream.registry), in the log and in each meta
store; and that a store takes over, once and whole, what the log had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import (
    InvalidSettings,
    LogUnavailable,
    MetaAmbiguous,
    MetaUnavailable,
    UnsupportedVersion,
)
from millrace.log.protocol import Log, LogService
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import LogId
from millrace.msgstream import meta_registry
from millrace.msgstream import registry as module
from millrace.msgstream.memory import MemoryLogService
from millrace.msgstream.meta_registry import SPACE_PREFIX, MetaStoreRegistry
from millrace.msgstream.registry import (
    REGISTRY,
    ChannelCreation,
    LogRegistry,
    Registry,
    RegistryEvents,
    moved_event,
    open_registry_log,
)
from tests.coord.faulty_store import Fault, FaultyStore, Late, done_unheard, down, lost
from tests.meta.stores import STORES

OWNER = {"role": "proxy", "address": "10.0.0.1:19530", "description_text": "inserts of ä"}
Open = Callable[[], Registry]


def made(*names: str, **attributes: str) -> ChannelCreation:
    return ChannelCreation(names, OWNER, attributes)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LogService]:
    with RocksMQ(tmp_path / "log") as service:
        yield service


@pytest.fixture(params=["log", *STORES])
def another(request: pytest.FixtureRequest, service: LogService, tmp_path: Path) -> Iterator[Open]:
    """Opens the registry, as another process would."""
    if request.param == "log":
        yield lambda: LogRegistry(service)
        return
    rig = STORES[request.param](tmp_path, 10_000)
    yield lambda: MetaStoreRegistry(service, rig.another())
    rig.close()


def test_what_was_added_is_known_in_its_order_to_everybody_until_it_is_removed(another: Open) -> None:
    one, other = another(), another()
    assert one.known() == other.known() == []
    first, second, third = made("c9", "c1", "c5"), made("b", ttl="1d"), made("a/ü", "a")
    for each in (first, second, third):
        one.add(each)
    assert one.known() == other.known() == [first, second, third]
    for _ in range(2):
        other.remove(["c1", "b", "nobody's"])
        assert one.known() == [made("c9", "c5"), third]
    one.remove(["c9", "c5", "a/ü"])
    other.add(made("d"))
    assert one.known() == another().known() == [made("a"), made("d")]


def test_many_that_write_at_once_lose_nothing(another: Open) -> None:
    keep = [f"k{number}" for number in range(4)]

    def works(number: int) -> None:
        mine = another()
        for turn in range(6):
            mine.add(made(f"g{number}.{turn}", f"h{number}.{turn}"))
            mine.remove([f"g{number}.{turn}"])
        mine.add(made(keep[number]))

    threads = [threading.Thread(target=works, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    names = {name for each in another().known() for name in each.channels}
    assert names == {*keep, *(f"h{number}.{turn}" for number in range(4) for turn in range(6))}


# -- the log -----------------------------------------------------------------------------------------------------------


def entries(service: LogService) -> int:
    with open_registry_log(service) as log:
        found, position = 0, log.describe().begin
        while (run := log.read(position)).batch.num_rows:
            found, position = found + run.batch.num_rows, run.next
        return found


@pytest.mark.parametrize("living", [0, 10, 100])
def test_the_log_is_as_long_as_what_is_known_however_often_it_is_written(
    living: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_EVENTS", 32)
    with MemoryLogService() as service:
        registry = LogRegistry(service)
        kept = [made(f"k{number}", f"gone{number}") for number in range(living)]
        for each in kept:
            registry.add(each)
        registry.remove([f"gone{number}" for number in range(living)])
        for number in range(200):
            registry.add(made(f"c{number}"))
            registry.remove([f"c{number}"])
            assert entries(service) <= 2 * max(module.MIN_EVENTS, living) + living + 4
        assert registry.known() == [made(f"k{number}") for number in range(living)]


class Hooked:
    """A log service to whose registry others write just before, or just behind, an append of this one."""

    def __init__(self, service: LogService) -> None:
        self.service = service
        self.before: Callable[[Sequence[bytes]], None] = lambda values: None
        self.behind: Callable[[Sequence[bytes]], None] = lambda values: None

    def __getattr__(self, name: str) -> object:
        return getattr(self.service, name)

    def open(self, pchannel: str) -> Log:
        hooked, log = self, self.service.open(pchannel)

        class Hooking:
            def __getattr__(self, name: str) -> object:
                return getattr(log, name)

            def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
                assert isinstance(values, list)
                hooked.before(values)
                written = log.append(values)
                hooked.behind(values)
                return written

        return Hooking()  # type: ignore[return-value]


@pytest.fixture
def hooked(service: LogService, monkeypatch: pytest.MonkeyPatch) -> Hooked:
    monkeypatch.setattr(module, "MIN_EVENTS", 3)
    return Hooked(service)


def anew(values: Sequence[bytes]) -> bool:
    return any(b'"again": true' in each for each in values)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_what_others_write_while_the_log_is_written_anew_stands(service: LogService, hooked: Hooked, when: str) -> None:
    other, own = LogRegistry(service), LogRegistry(hooked)  # type: ignore[arg-type]
    came: list[str] = []

    def comes(values: Sequence[bytes]) -> None:
        if anew(values):
            came.append(f"o{len(came)}")
            other.add(made(came[-1]))
            other.remove(["a"])

    setattr(hooked, when, comes)
    own.add(made("a", "b"))
    for number in range(20):
        own.add(made(f"c{number}"))
        own.remove([f"c{number}"])
    assert len(came) >= 3
    names = {name for each in own.known() for name in each.channels}
    # One that was removed in just that moment may be back as a name: it has no log any more
    # (millrace.msgstream.channels).
    assert names - {"a"} == {"b", *came}


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_log_that_moves_while_it_is_written_anew_moves_whole(service: LogService, hooked: Hooked, when: str) -> None:
    """Though who moved it died when it had said so."""
    own, store = LogRegistry(hooked), FaultyStore()  # type: ignore[arg-type]
    moved: list[bool] = []

    def moves(values: Sequence[bytes]) -> None:
        if anew(values) and not moved:
            moved.append(True)
            dies(service, store, [*[None] * 3, down])

    setattr(hooked, when, moves)
    added: list[str] = []
    with pytest.raises(InvalidSettings, match="MILLRACE_META_STORE"):  # noqa: PT012
        for number in range(20):
            added.append(f"c{number}")
            own.add(made(added[-1], f"gone{number}"))
            own.remove([f"gone{number}"])
    assert moved
    names = {name for each in MetaStoreRegistry(service, store).known() for name in each.channels}
    # Moved behind the event that made it long: that one stands, and the next one is refused.
    assert {*added[:-1]} <= names <= {*added, *(f"gone{number}" for number in range(20))}
    assert added[-1] not in names


def test_an_append_that_is_not_answered_is_harmless_to_repeat(service: LogService, hooked: Hooked) -> None:
    registry = LogRegistry(hooked)  # type: ignore[arg-type]
    fails = [True, False]

    def unheard(values: Sequence[bytes]) -> None:
        if fails.pop(0):
            raise LogUnavailable("no answer")

    hooked.behind = unheard
    with pytest.raises(LogUnavailable):
        registry.add(made("a"))
    registry.add(made("a"))
    hooked.behind = lambda values: None
    assert registry.known() == [made("a")]


# -- a store -----------------------------------------------------------------------------------------------------------


def test_answers_of_the_store_that_are_lost_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_registry, "_PAUSE", 0.001)
    for fault in (down, done_unheard, lost, Late()):
        for at in range(10):
            store = FaultyStore()
            with MemoryLogService() as own:
                registry = MetaStoreRegistry(own, store)
                store.script = [None] * at + [fault]
                registry.add(made("a", "b"))
                registry.add(made("c"))
                registry.remove(["a", "c"])
                assert not store.script, "the fault was met"
                known = registry.known()
                if isinstance(fault, Late):
                    fault.come()
                    known = registry.known()
                assert known == [made("b")]


def test_a_store_that_stays_away_is_an_error_that_says_so(service: LogService) -> None:
    store = FaultyStore()
    registry = MetaStoreRegistry(service, store, seconds=0.05)
    registry.add(made("a"))
    store.script = [None, *[down] * 1000]
    with pytest.raises(MetaUnavailable):
        registry.add(made("b"))
    store.script = [None, *[lost] * 1000]
    with pytest.raises(MetaAmbiguous):
        registry.add(made("b"))
    store.script = []
    assert registry.known() == [made("a")]


def test_a_store_has_a_key_for_each_creation_and_several_logs(service: LogService) -> None:
    store = FaultyStore()
    with MemoryLogService() as other:
        here, there = MetaStoreRegistry(service, store), MetaStoreRegistry(other, store)
        for number in range(50):
            here.add(made(f"c{number}", f"d{number}"))
            there.add(made(f"c{number}"))
            here.remove([f"c{number}"])
            here.remove([f"d{number}"])
        assert here.known() == []
        assert len(there.known()) == 50
        assert len(store.list(SPACE_PREFIX).entries) == 2 + 50


@pytest.mark.parametrize("how", [down, done_unheard])
@pytest.mark.parametrize("at", range(8))
def test_a_store_takes_over_what_the_log_had_once_wherever_it_breaks_off(
    service: LogService, at: int, how: Callable[[Callable[[], object]], object]
) -> None:
    log, store = LogRegistry(service), FaultyStore()
    for number in range(9):
        log.add(made(f"c{number}", f"gone{number}"))
    log.remove([f"gone{number}" for number in range(9)])
    had = log.known()
    store.script = [None] * at + [how]
    try:
        MetaStoreRegistry(service, store, seconds=0.0).known()
    except (MetaUnavailable, MetaAmbiguous):
        pass
    store.script = []
    one = MetaStoreRegistry(service, store)
    assert one.known() == had
    one.remove(["c3"])
    assert MetaStoreRegistry(service, store).known() == [each for each in had if each != made("c3")], "and never again"
    assert entries(service) == 1, "the log says where it moved, and nothing else"
    for call in (log.known, lambda: log.add(made("late")), lambda: log.remove(["c1"])):
        with pytest.raises(InvalidSettings, match="MILLRACE_META_STORE"):
            call()
    assert MetaStoreRegistry(service, store).known() == [each for each in had if each != made("c3")]
    with pytest.raises(InvalidSettings, match="another meta store"):
        MetaStoreRegistry(service, FaultyStore()).known()


def dies(service: LogService, store: FaultyStore, script: list[Fault | None]) -> None:
    """A process takes the registry over as far as the store lets it, which then is away."""
    store.script = [*script, *[down] * 100]
    with pytest.raises((MetaUnavailable, MetaAmbiguous)):
        MetaStoreRegistry(service, store, seconds=0.0).known()
    store.script = []


def test_what_comes_late_of_one_that_took_over_brings_nothing_back(service: LogService) -> None:
    log, store, late = LogRegistry(service), FaultyStore(), Late()
    for number in range(9):
        log.add(made(f"c{number}"))
    dies(service, store, [*[None] * 3, down])  # behind the event that says where it moves
    for commits in range(3):  # of the first creations, of the next ones, and of the end
        dies(service, store, [*[None] * (2 * commits + 1), late])
    assert len(late.calls) == 3
    store.script = []
    registry = MetaStoreRegistry(service, store)
    registry.remove([f"c{number}" for number in range(9)])
    registry.add(made("new"))
    late.come()
    assert MetaStoreRegistry(service, store).known() == [made("new")]


def test_processes_that_take_over_at_once_have_one_space(service: LogService) -> None:
    log, store = LogRegistry(service), FaultyStore()
    log.add(made("before"))
    start = threading.Barrier(6, timeout=30.0)

    def works(number: int) -> None:
        start.wait()
        MetaStoreRegistry(service, store).add(made(f"c{number}"))

    threads = [threading.Thread(target=works, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    known = MetaStoreRegistry(service, store).known()
    assert known[0] == made("before")
    assert {each.channels for each in known[1:]} == {(f"c{number}",) for number in range(6)}
    assert len(store.list(SPACE_PREFIX).entries) == 1 + 7, "who was not the first left nothing"


def test_an_event_of_another_version_is_refused(service: LogService) -> None:
    LogRegistry(service).add(made("a"))
    with open_registry_log(service) as log:
        log.append([b'{"version": 3, "op": "create"}'])
    for registry in (LogRegistry(service), MetaStoreRegistry(service, FaultyStore())):
        with pytest.raises(UnsupportedVersion):
            registry.known()
    assert b'"version": 2' in moved_event("x"), "builds that know no other place refuse it by its version"


def test_reading_begins_anew_where_another_process_gave_up_the_begin(service: LogService) -> None:
    LogRegistry(service).add(made("a"))
    LogRegistry(service).add(made("b"))

    class Stale:
        """Says once where the log began before it was truncated."""

        def __init__(self, log: Log) -> None:
            self.log, self.begins = log, [log.describe()]

        def __getattr__(self, name: str) -> object:
            return getattr(self.log, name)

        def describe(self) -> object:
            return self.begins.pop() if self.begins else self.log.describe()

    with MemoryLogService() as memory:
        registry = LogRegistry(memory)
        registry.add(made("a"))
        registry.add(made("b"))
        with open_registry_log(memory) as log:
            stale = Stale(log)
            log.truncate(LogId(0, 1))
            assert [each.channels for each in RegistryEvents.of(stale).creations()] == [("b",)]  # type: ignore[arg-type]
    assert REGISTRY in service.names()
