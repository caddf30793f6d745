"""A file that two logs name goes when neither needs it within its retention, whichever lets go of it last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace.storage import published, replaced_files
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.delta_log import commit_file
from millrace.storage.file_sink import FileSink
from millrace.storage.local import LocalStore
from millrace.storage.published import AddedFile, PublishedChange, PublishedTable
from millrace.storage.replaced_files import FileRemover, published_needs
from millrace.storage.table import create_table, table_at
from tests.storage.published_world import positions

COLUMNS = pa.schema([pa.field("id", pa.int64())])
RETENTION, PUBLISHED = 600.0, 1000.0


@contextmanager
def allowed() -> Iterator[bool]:
    yield True


class Shared:
    """A rows table and its published table, under a clock of their own, and what each needs of their files."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, publish_retention: float = PUBLISHED) -> None:
        self.publish_retention = publish_retention
        self.now = 1_700_000_000.0
        patch.setattr("millrace.storage.commit.time.time", lambda: self.now)
        patch.setattr(published, "_now_ms", lambda: int(self.now * 1000))
        self.folder = folder / "tables/1"
        self.rows = create_table(f"{self.folder}/_rows", COLUMNS, partition_by=[])
        self.stamp(0)
        self.published = PublishedTable.create(LocalStore(self.folder), COLUMNS, collection_id=1)
        self.sizes: dict[str, int] = {}
        self.replaced: dict[str, float] = {}
        """By file of the rows table, when it was replaced."""
        self.let_go: dict[str, float] = {}
        """By file that was published, when it no longer was."""
        self.pin: int | None = None
        self.ticks = 0

    def stamp(self, version: int) -> None:
        """Have the commit tell the time of this test: delta-rs stamps it with the machine's."""
        path = Path(f"{self.folder}/_rows") / commit_file(version)
        lines = [line for line in path.read_text().splitlines() if '"commitInfo"' not in line]
        info = {"commitInfo": {"operation": "WRITE", "timestamp": int(self.now * 1000)}}
        path.write_text("\n".join([*lines, json.dumps(info)]) + "\n")

    def write(self, *, removes: int = 0) -> None:
        """Commit a file in place of some others."""
        sink = FileSink.at(self.rows.uri, COLUMNS, ("id",))
        sink.write(pa.table({"id": [len(self.sizes)]}, schema=COLUMNS), {})
        adds = sink.finish()
        old = sorted(self.rows.live_files())[:removes]
        commit_fenced(self.rows, [CommitPart(adds, old)])
        self.stamp(self.rows.version)
        self.sizes |= {each.path: each.size for each in adds}
        self.replaced |= dict.fromkeys(old, self.now)

    def publish(self) -> None:
        """Publish what the rows table has, with a masked row in the first file."""
        live, there = self.rows.live_files(), set(self.published.files)
        add = [AddedFile(f"_rows/{name}", size, 1) for name, size in live.items() if f"_rows/{name}" not in there]
        remove = sorted(there - {f"_rows/{name}" for name in live})
        self.ticks += 1
        mask = {}
        if kept := sorted(there - set(remove)):
            mask = {kept[0]: positions([] if self.ticks % 2 else [0])}
        self.published.commit(PublishedChange(self.ticks << 18, 1, add=add, remove=remove, mask=mask))
        self.let_go |= {path.removeprefix("_rows/"): self.now for path in remove}

    def remover(self) -> FileRemover:
        return FileRemover(
            retention=RETENTION,
            publish_retention=self.publish_retention,
            oldest_pin=lambda: self.pin,
            permit=allowed,
            now=lambda: self.now,
        )

    def on_disk(self) -> set[str]:
        return {path.name for path in Path(self.rows.uri).glob("*.parquet")}

    def needed(self) -> set[str]:
        """What must be there: by the rows table's log, or by the published table's."""
        named = {path.removeprefix("_rows/") for path in self.published.files}
        recent = {name for name, at in self.replaced.items() if at > self.now - RETENTION}
        shown = {name for name, at in self.let_go.items() if at > self.now - self.publish_retention}
        return {*self.rows.live_files(), *named, *recent, *shown}


STEPS = st.lists(
    st.sampled_from(["write", "replace", "publish", "remove", "remove published", "wait", "wait long"]), max_size=25
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.sampled_from([0.0, 100.0, PUBLISHED]))
@example(["write", "publish", "replace", "publish", "wait", "remove published"], 100.0)
@example(["write", "publish", "replace", "publish", "wait long", "remove", "remove published"], PUBLISHED)
def test_no_needed_file_goes_and_each_other_does_in_the_end(steps: list[str], publish_retention: float) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = Shared(Path(folder), patch, publish_retention=publish_retention)
        remover = world.remover()
        for step in [*steps, "replace", "publish"]:
            match step:
                case "write" | "replace":
                    world.write(removes=2 if step == "replace" else 0)
                case "publish":
                    world.publish()
                case "remove":
                    remover.remove(world.rows)
                case "remove published":
                    remover.remove_published(world.published)
                case _:
                    world.now += 300 if step == "wait" else 1200
            assert world.needed() <= world.on_disk(), step
        world.now += 2 * PUBLISHED
        remover.remove(world.rows)
        remover.remove_published(world.published)
        assert world.on_disk() == set(world.rows.live_files()) == world.needed()
        vectors = {each.vector.file for each in world.published.files.values() if each.vector is not None}
        found = {str(path.relative_to(world.folder)) for path in world.folder.glob("_rows/_vectors/*")}
        assert found == vectors


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    made = Shared(tmp_path, monkeypatch)
    made.write()
    made.publish()
    return made


def test_a_reader_of_an_older_version_finds_its_files_within_the_retention(world: Shared) -> None:
    world.write(removes=1)
    world.publish()
    world.now += PUBLISHED - 1
    assert world.remover().remove(world.rows) == world.remover().remove_published(world.published) == 0
    world.now += 2
    assert world.remover().remove_published(world.published) == 1


def test_a_pin_keeps_what_a_published_version_names(world: Shared) -> None:
    world.pin = int(world.now * 1000)
    world.now += 1
    world.write(removes=1)
    world.publish()
    world.now += 10 * PUBLISHED
    assert world.remover().remove_published(world.published) == 0
    world.pin = None
    assert world.remover().remove_published(world.published) == 1


def test_where_nothing_is_published_the_retention_of_rows_alone_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Shared(tmp_path, monkeypatch)
    world.write()
    world.write(removes=1)
    world.now += RETENTION + 1
    assert world.remover().remove(world.rows) == 1


def test_an_unreadable_published_log_keeps_all_files(world: Shared) -> None:
    world.write(removes=1)
    (world.folder / commit_file(world.published.version)).write_text("{torn")
    world.now += 10 * PUBLISHED
    with pytest.raises(Exception, match="cannot read"):
        world.remover().remove(world.rows)
    assert world.needed() <= world.on_disk()


def test_vacuum_spares_what_is_published(world: Shared) -> None:
    world.publish()  # with a vector
    world.write(removes=1)
    vectors = list(world.folder.glob("_rows/_vectors/*"))
    spare = published_needs(world.rows.uri, since_ms=0)
    assert len(spare) == len(vectors) == 1
    assert table_at(world.rows.uri).vacuum(0, full=True, spare=spare) == []
    assert spare <= world.on_disk()
    assert table_at(world.rows.uri).vacuum(0, full=True) == [*spare]
    assert list(world.folder.glob("_rows/_vectors/*")) == vectors


def test_a_removal_opens_the_other_table_only_if_there_is_something_to_remove(
    world: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(name: str, real: Any) -> Any:
        return lambda *args, **options: (opened.append(name), real(*args, **options))[1]

    monkeypatch.setattr(replaced_files, "open_table", counted("rows", replaced_files.open_table))
    monkeypatch.setattr(PublishedTable, "open", counted("published", PublishedTable.open))
    remover = world.remover()
    for _ in range(5):
        world.write()
        world.publish()
        world.now += 2 * PUBLISHED
        remover.remove(world.rows)
        remover.remove_published(world.published)
    assert opened == []
    world.write(removes=1)
    world.publish()
    world.now += 2 * PUBLISHED
    remover.remove_published(world.published)
    remover.remove(world.rows)
    assert opened == ["rows", "published"]
