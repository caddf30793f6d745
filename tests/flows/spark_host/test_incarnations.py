"""What is kept of a stream, in the data folder, and in a bucket and a meta store that machines share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from millrace.base.errors import InvalidSettings, InvalidStream, StreamBusy, UnsupportedVersion
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import stream_of
from millrace.flows.sinks.collection.journal import FolderJournal, InFlight
from millrace.flows.sinks.memory import Folder, Noted, begun, below, keep_note, name_in
from millrace.flows.spark_host import incarnations
from millrace.flows.spark_host.incarnations import Begun, Incarnations, position, require_reachable
from millrace.storage.store import list_below, store_at


def stream(**changes: Any) -> Flow:
    return stream_of({"name": "one", "source": "flights", "sink": "into", **changes})


def files(folder: Folder) -> dict[str, int]:
    return list_below(store_at(folder))


def put(kept: Incarnations, name: str, data: bytes = b"something") -> None:
    store_at(kept.checkpoint(kept.state)).replace(name, data)


def reach(kept: Incarnations, tick: int, *, ended: bool = True) -> None:
    """Leave the checkpoint as Spark does, with a micro-batch up to `tick`."""
    offset = f'{{"collection": 1, "ticks": {{"dml_0": {tick}}}, "snapshot": 0, "given": 0, "since": {{}}}}'
    for number in (0, 1):
        put(kept, f"offsets/{number}", f"v1\n{{}}\n{offset}".encode())
    if ended:
        put(kept, "commits/0", b"v1\n{}")


def test_a_changed_declaration_runs_after_an_upgrade_and_a_paused_stream_not_at_all(places: Settings) -> None:
    kept, first = Incarnations(places, "one"), stream()
    with kept.locked():
        state = kept.admitted(first)
        with pytest.raises(StreamBusy):
            kept.replay(first, Begun(after=0))
    assert state.incarnation == 1
    assert kept.admitted(stream(seconds=5.0, words="of no weight")) == state
    put(kept, "millrace-sink/operator/part")
    assert kept.admitted(stream(version=9)).fingerprint == stream(version=9).fingerprint(), "nothing was handed on"
    assert not files(kept.checkpoint(state)), "and what the first declaration made is gone"
    assert kept.admitted(first) == state
    kept.hand()
    state = kept.admitted(first)
    assert state.handed
    changed = stream(version=2)
    with pytest.raises(InvalidStream, match="upgrade one --keep-state"):
        kept.admitted(changed)
    assert kept.upgrade(changed, keep_state=True).incarnation == 1
    kept.admitted(changed)
    reach(kept, 7, ended=False)
    assert position(kept.checkpoint(state)) is None, "no micro-batch has ended"
    reach(kept, 7)
    fresh = kept.upgrade(stream(version=3), keep_state=False)
    assert (fresh.incarnation, fresh.begun) == (2, Begun(ticks={"dml_0": 7}))
    with pytest.raises(InvalidStream, match="no position yet"):
        kept.move(stream(version=3), {"dml_0": 3})
    reach(kept, 9)
    with pytest.raises(InvalidStream, match="dml_7: no such lane"):
        kept.move(stream(version=3), {"dml_7": 3})
    assert kept.move(stream(version=3), {"dml_0": 4}) == {"dml_0": 4}
    assert (kept.state.incarnation, kept.state.begun) == (3, Begun(ticks={"dml_0": 4}))
    again = kept.replay(stream(version=3), Begun(after=0))
    assert (again.incarnation, again.begun) == (4, Begun(after=0))
    assert not files(below(kept.folder, "2")), "the checkpoint before the last is gone"
    kept.pause(paused=True)
    with pytest.raises(InvalidStream, match="is paused: `millrace flows resume one`"):
        kept.admitted(stream(version=3))
    kept.pause(paused=False)
    kept.admitted(stream(version=3))


def elsewhere(settings: Settings) -> Settings:
    """Settings of another machine, whose data folder is empty."""
    return replace(settings, data_dir=settings.data_dir.with_name("other"))


def test_another_machine_goes_on_where_the_first_one_was(shared: Settings) -> None:
    first = Incarnations(shared, "one")
    with first.locked():
        first.admitted(stream())
        first.hand()
        reach(first, 7)
    second = Incarnations(elsewhere(shared), "one")
    assert (second.state, second.folder) == (first.state, f"{shared.tables}/streams/one")
    assert position(second.checkpoint(second.state)) == {"dml_0": 7}
    with second.locked():
        assert second.admitted(stream()) == first.state
    second.pause(paused=True)
    assert first.state.paused
    assert not [path for path in shared.data_dir.rglob("*") if path.is_file() and path.name != "lock"]


def test_one_machine_at_a_time_holds_a_stream(shared: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with Incarnations(shared, "one").locked() as lock:
        with pytest.raises(StreamBusy, match=r"runs in another process \(.*\): stop it first"):
            Incarnations(elsewhere(shared), "one").locked()
        lock.require_held()
        assert lock.lease is not None
        # A driver that is suspended renews nothing; the other machine gets the stream, and this one hands on no batch.
        monkeypatch.setattr(lock.lease, "run_once", lambda: None)
        with Incarnations(elsewhere(shared), "one").locked() as other:
            other.require_held()
            with pytest.raises(StreamBusy, match="another machine may run it"):
                lock.require_held()
    Incarnations(shared, "one").locked().close()


@pytest.mark.parametrize("dies", ["", "streams.copied", "streams.moved"])
def test_a_checkpoint_of_the_data_folder_moves_to_the_bucket_and_back(
    shared: Settings, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """A kill at any step leaves one of the places in force; the rest of the other has no effect."""

    def die(name: str) -> None:
        if name == dies:
            raise KeyboardInterrupt

    plain = replace(shared, tables="", meta_store="")
    old = Incarnations(plain, "one")
    old.pause(paused=False)
    old.admitted(stream())
    old.hand()
    reach(old, 7)
    put(old, "offsets/.0.crc")
    put(old, "millrace-sink/operator/part-1")
    for settings in (shared, replace(shared, tables="")):
        kept = Incarnations(settings, "one")
        store_at(kept.home).replace("1/offsets/5", b"of an attempt that was killed")
        with monkeypatch.context() as patch, kept.locked():
            patch.setattr(incarnations, "hit", die)
            if dies:
                with pytest.raises(KeyboardInterrupt):
                    kept.admitted(stream())
                assert position(kept.checkpoint(kept.state)) == {"dml_0": 7}
        with kept.locked():
            kept.admitted(stream())
        assert kept.state.handed
        assert str(kept.folder) == str(kept.home)
        assert position(kept.checkpoint(kept.state)) == {"dml_0": 7}
        assert {"1/millrace-sink/operator/part-1", "1/offsets/0"} <= set(files(kept.home))
        assert "1/offsets/.0.crc" not in files(kept.home)
    with pytest.raises(InvalidStream, match=r"is in the meta store sqlite.*: set MILLRACE_META_STORE"):
        _ = old.state


def test_a_state_of_a_newer_build_is_refused_and_one_in_a_folder_stays_readable(settings: Settings) -> None:
    kept = Incarnations(settings, "one")
    kept.pause(paused=False)
    written = json.loads((settings.data_dir / "streams" / "one" / "state.json").read_text())
    assert written["version"] == 1, "earlier builds read it"
    assert "place" not in written
    keep_note(settings.data_dir / "streams" / "one", "state.json", written | {"version": incarnations.VERSION + 1})
    with pytest.raises(UnsupportedVersion, match="run the newer build"):
        _ = kept.state


def test_a_checkpoint_that_executors_do_not_reach_is_refused(settings: Settings, shared: Settings) -> None:
    packed = {"spark_master": "spark://there:7077", "spark_environment": "/packed.tar.gz"}
    require_reachable(settings, "one")
    require_reachable(replace(shared, **packed), "one")
    for tables in ("", "gs://bucket/tables"):
        with pytest.raises(InvalidSettings, match="put the tables on S3"):
            require_reachable(replace(settings, tables=tables, **packed), "one")


def test_a_sinks_memory_is_the_same_for_the_next_driver(places: Settings) -> None:
    kept = Incarnations(places, "one")
    with kept.locked():
        folder = incarnations.sink_folder(kept.checkpoint(kept.admitted(stream())))
    assert name_in(folder, "app.json") == name_in(folder, "app.json")
    assert begun(folder, at=7) == begun(folder) == 7
    assert Noted.load(folder) == Noted()
    for number in (3, 12):
        Noted(number, 5, 1).keep(folder, synced=number == 3)
        assert Noted.load(folder) == Noted(number, 5, 1)
    journal = FolderJournal(folder, "one")
    assert journal.load() is None
    journal.keep(InFlight(Noted(13, 2), {"dml_0": 4}, renumber=True))
    again = journal.load()
    assert again is not None
    assert (again.noted, again.since, again.renumber) == (Noted(13, 2), {"dml_0": 4}, True)
    journal.done(Noted(13, 2))
    journal.close()
    taken = FolderJournal(folder, "one")
    assert (taken.producer_id, taken.noted()) == (journal.producer_id, Noted(13, 2))
    taken.close()


def test_a_driver_that_lost_the_stream_while_it_computed_a_batch_sends_nothing(shared: Settings) -> None:
    """It asked for its hold when the batch began. The next driver has opened the sink since."""
    folder = f"{shared.tables}/streams/one/1/millrace-sink"
    former, owner = FolderJournal(folder, "one"), FolderJournal(folder, "one")
    assert former.producer_id == owner.producer_id
    owner.keep(InFlight(Noted(7), {"dml_0": 3}))
    with pytest.raises(StreamBusy, match="another driver writes to 'one' by now"):
        former.keep(InFlight(Noted(6), {"dml_0": 2}))
    with pytest.raises(StreamBusy):
        former.load()  # to send it
    found = owner.load()
    assert found is not None
    assert found.noted.batch_id == 7, "the former driver's batch is not in place of it"
    owner.keep(InFlight(Noted(8), {}))


def test_a_driver_that_slept_through_a_move_of_the_tables_sends_nothing(
    shared: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the next driver was killed before it removed the old place."""
    kept, moved = Incarnations(shared, "one"), replace(shared, tables=f"{shared.tables}-moved")
    with kept.locked():
        folder = incarnations.sink_folder(kept.checkpoint(kept.admitted(stream())))
        sleeper = FolderJournal(folder, "one")
        sleeper.keep(InFlight(Noted(3), {"dml_0": 1}))
        inner = FolderJournal(f"{folder}/late", "one")  # an operator's second sink

    def die(name: str) -> None:
        if name == "streams.moved":
            raise KeyboardInterrupt

    after = Incarnations(moved, "one")
    with after.locked():
        with monkeypatch.context() as patch:
            patch.setattr(incarnations, "hit", die)
            with pytest.raises(KeyboardInterrupt):
                after.admitted(stream())
        owner = FolderJournal(incarnations.sink_folder(after.checkpoint(after.admitted(stream()))), "one")
        for each in (sleeper, inner):
            with pytest.raises(StreamBusy, match="another driver writes"):
                each.keep(InFlight(Noted(4), {"dml_0": 2}))
        found = owner.load()
        assert found is not None
        assert found.noted.batch_id == 3
        assert owner.producer_id == sleeper.producer_id
