"""Commits, crash points and interleavings with the tables in a bucket, through requests that fail or lose answers."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.committer import WalCommitter
from millrace.storage import log_mirror
from millrace.storage.local import LocalStore
from millrace.storage.published import PublishedTable
from millrace.storage.store import list_below, store_at
from millrace.storage.table import table_at
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.table import WalTable
from millrace.wal.digest import digest_rows
from tests.crash.commit_once import commit_once
from tests.crash.publish_process import publish
from tests.crash.test_commit_crash_points import PCHANNELS, append
from tests.crash.test_commit_interleavings import (
    Actor,
    Ranges,
    both_share_all_pchannels,
    check,
    drive,
    one_shares_a_pchannel_with_the_other,
    same_first_range,
)
from tests.crash.test_flusher_crash_points import RANGE_BYTES, Deployment, contents, die, places, stopping_at
from tests.crash.test_flusher_crash_points import _Died as Died
from tests.crash.test_publish_kills import content
from tests.failpoints import at_failpoints, die_at
from tests.node.log_samples import accepted, opening, rejected, tick
from tests.node.wal_samples import inserts
from tests.s3_server import Faults, bucket


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as proxy:
        yield proxy


@pytest.fixture
def box(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket that every process reaches through faults."""
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(log_mirror, "_made", {})
    chosen, guard = random.Random(6), threading.Lock()

    def broken(method: str, path: str) -> str:
        with guard:
            return chosen.choice([""] * 20 + ["503", "reset", "lost", "slow"])

    with bucket(monkeypatch, faults.at) as uri:
        faults.break_request = broken
        yield uri


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "place, stands",
    [
        ("commit.done", True),
        ("commit.checked", False),
        ("range.written", False),
        ("range.written@2", False),
        ("checkpoint.written", True),
    ],
)
def test_every_row_is_there_once_wherever_the_node_died(tmp_path: Path, box: str, place: str, stands: bool) -> None:
    log, wal = tmp_path / "log", f"{box}/wal"
    rows = append(log, opening(), accepted(), rejected(b"x"))
    assert commit_once(log, wal) == rows
    added = append(log, accepted(), rejected(b"y"), tick())
    rows += added
    die_at(place, "tests.crash.commit_once", log, wal)
    assert commit_once(log, wal) == (0 if stands else added)
    rows += append(log, accepted())
    assert commit_once(log, wal) == len(PCHANNELS)
    found = table_at(wal).dataset().to_table()
    found = found.filter([kind != "state" for kind in found.column("kind").to_pylist()])
    ids = set(zip(*(found.column(name).to_pylist() for name in ("pchannel", "entry", "ordinal")), strict=True))
    assert found.num_rows == len(ids) == rows
    totals = [WalTable.open(wal).position(name).totals for name in PCHANNELS]
    assert digest_rows(found) == totals[0].digest + totals[1].digest


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranges", [same_first_range, both_share_all_pchannels, one_shares_a_pchannel_with_the_other])
def test_two_committers_leave_no_lost_and_no_doubled_row_in_any_order(box: str, ranges: Ranges) -> None:
    seen: set[str] = set()
    for number, schedule in enumerate(itertools.product((0, 1), repeat=5)):
        if any(taken.startswith("".join("AB"[index] for index in schedule)) for taken in seen):
            continue
        uri = WalTable.create(f"{box}/wal{number}").uri
        taken, actors = drive(uri, ranges, schedule)
        check(uri, actors)
        seen.add(taken)
    assert {taken[:2] for taken in seen} >= {"AB", "BA"}, "both had checked before either committed"


def test_a_zombie_that_wakes_up_after_its_successor_changes_nothing(box: str) -> None:
    uri = WalTable.create(f"{box}/wal").uri
    base = WalTable.open(uri).position("p0")
    zombie = Actor(uri, [inserts(uri, base, 1, 2)])
    zombie.step()
    successor = WalCommitter(WalTable.open(uri))
    for entries in ((1, 2), (3,), (4, 5)):
        assert successor.commit([inserts(uri, successor.table.position("p0"), *entries)]).committed
    while not zombie.finished:
        zombie.step()
    assert zombie.error is None
    assert zombie.result is not None
    assert zombie.result.fenced
    found = table_at(uri).dataset().to_table(columns=["kind", "entry"]).to_pylist()
    assert sorted(each["entry"] for each in found if each["kind"] == "message") == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "place", ["publish.committed", "publish.vectors", "publish.checked", "checkpoint.written", "publish.expired@2"]
)
def test_each_tick_is_published_once_wherever_the_publisher_died(tmp_path: Path, box: str, place: str) -> None:
    died, lived = f"{box}/died", tmp_path / "lived"
    publish(died, 2)
    die_at(place, "tests.crash.publish_process", died, 7)
    standing = PublishedTable.open(store_at(died))
    assert standing is not None
    assert content(standing) == content(publish(lived, standing.version)), "a whole version, that of its tick"
    table = publish(died, 9)
    assert content(table) == content(publish(lived, 9))
    assert table.version == 9, "no tick was published twice"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(Settings(data_dir=tmp_path_factory.mktemp("wal") / "data"))


def in_bucket(deployment: Deployment, folder: Path, uri: str) -> Settings:
    """A copy of the deployment with its tables below `uri`."""
    source, target = LocalStore(deployment.settings.data_dir), store_at(uri)
    for name in list_below(source):
        target.take(source, name, "copy")
    return replace(deployment.copy(folder), tables=uri)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_flusher_that_dies_between_any_two_commits_is_made_good_by_the_next(
    deployment: Deployment, box: str, tmp_path: Path
) -> None:
    plain = deployment.copy(tmp_path / "clean")
    flush_to_end(plain, max_bytes=RANGE_BYTES)
    clean: dict[str, Counter[Any]] = contents(plain)
    names = places(deployment, tmp_path / "names")
    for number, name in enumerate(names):
        settings = in_bucket(deployment, tmp_path / str(number), f"{box}/{number}")
        before = sorted(read_arrow(settings, 1).to_pylist(), key=str)
        with pytest.raises(Died), at_failpoints(stopping_at(number, die)):
            flush_to_end(settings, max_bytes=RANGE_BYTES)
        assert sorted(read_arrow(settings, 1).to_pylist(), key=str) == before, f"read after {name}"
        flush_to_end(settings, max_bytes=RANGE_BYTES)
        assert contents(settings) == clean, f"died at {name} ({number})"
