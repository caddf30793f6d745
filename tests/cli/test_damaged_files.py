"""A table's file that is missing or does not read.

An error by its code, exit code 3, and what repairs it; never a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.base.errors import TableDamaged
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.client.consume.scan import scan
from millrace.tables.collections import flush_tables
from tests.cli.deployment import Deployment


@pytest.fixture(scope="module")
def users(shared: Deployment) -> Deployment:
    """Rows in table and WAL, and a delete in each."""
    shared.create_users()
    for first in (0, 10):
        shared.produce(*({"id": number, "name": "n" * 50} for number in range(first, first + 10)))
        shared.as_json("produce", "users", "-", "--delete", stdin=f'{{"id": {first}}}\n')
        shared.catch_up(flush=first == 0)
    return shared


def removed(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def garbled(path: Path) -> None:
    """Bytes of the first page, just behind the magic word."""
    data = bytearray(path.read_bytes())
    data[4:40] = bytes(36)
    path.write_bytes(data)


@pytest.fixture(params=[removed, cut, garbled], ids=lambda harm: harm.__name__)
def harm(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """Damages a file, until the test has ended."""
    kept: dict[Path, bytes] = {}

    def damage(path: Path) -> None:
        kept[path] = path.read_bytes()
        request.param(path)
        flush_tables._read.clear()  # a command has a process of its own

    yield damage
    for path, data in kept.items():
        path.write_bytes(data)


def a_file(folder: Path) -> Path:
    return min(folder.rglob("*.parquet"))


def damaged(users: Deployment, *arguments: str) -> str:
    result = users.run(*arguments)
    assert result.exit_code == 3, f"{result.exit_code}\n{result.stdout}\n{result.stderr}{result.exception!r}"
    said = result.stdout + result.stderr
    assert "Traceback" not in said
    assert "TABLE_DAMAGED" in said
    assert "recovery" in said, "it says what repairs it"
    return str(said)


@pytest.mark.parametrize("table", ["tables/1/_rows", "deletes/1"])
def test_a_damaged_file_of_a_collection(users: Deployment, harm: Callable[[Path], None], table: str) -> None:
    harm(a_file(users.settings.data_dir / table))
    damaged(users, "verify")
    damaged(users, "read", "users")


def test_a_damaged_file_of_the_wal(users: Deployment, harm: Callable[[Path], None]) -> None:
    newest = max(
        (Path(users.settings.wal_uri) / "kind=message").rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns
    )
    harm(newest)
    damaged(users, "verify")
    damaged(users, "read", "users")
    damaged(users, "scan", "dml_0")


def test_a_scan_of_a_wal_file_that_is_gone_ends_and_does_not_look_for_ever(users: Deployment) -> None:
    settings: Settings = users.settings
    path = a_file(Path(settings.wal_uri) / "kind=message")
    data = path.read_bytes()
    path.unlink()
    try:
        with AppendClient.connect(settings.data_dir, start=False) as client:
            until = client.tick("dml_0")
            with (
                pytest.raises(TableDamaged),
                scan("dml_0", wal=Path(settings.wal_uri), tail=client, until_tick=until) as units,
            ):
                list(units)
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("command", ["checkpoints", "segments"])
def test_a_damaged_file_of_what_the_flusher_keeps(
    users: Deployment, harm: Callable[[Path], None], command: str
) -> None:
    harm(a_file(users.settings.data_dir / command))
    damaged(users, command)


def test_a_garbled_delta_log(users: Deployment) -> None:
    entry = users.settings.data_dir / "tables" / "1" / "_rows" / "_delta_log" / f"{0:020d}.json"
    data = entry.read_bytes()
    entry.write_bytes(data.replace(b'"metaData"', b'"metaBata"', 1)[:-30])
    try:
        damaged(users, "read", "users")
        damaged(users, "verify")
    finally:
        entry.write_bytes(data)
