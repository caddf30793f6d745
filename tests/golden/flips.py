"""Every kind of durable file of a deployment, how to read it, and what became of a flipped bit: an answer for each.

The answers: ``same`` (nothing that is read depends on that bit), ``error`` (a MillraceError, by its code), ``other``
(something else is read, and nothing is said at once), ``verify`` (the same, but `millrace verify` finds it),
``untyped`` (another exception), ``aborted`` (the process that read it died).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.access.token_file import TokenFile
from millrace.base.errors import BackupDamaged, MillraceError, WalGap
from millrace.base.settings import Settings
from millrace.client.consume.positions import FilePositions
from millrace.client.spool.queue import Spool
from millrace.commands.verify import check_channels, check_collections
from millrace.coord.catalog.store import CatalogStore
from millrace.log.generations.generation_file import GenerationFile
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.node.range_loop.parking import read_parked
from millrace.operations.backup.manifest import BackupManifest
from millrace.operations.backup.verify import verify_backup as verify_backup
from millrace.operations.checkpoint import recovery_checkpoints
from millrace.storage.table import open_table
from millrace.tables.collections.bases import read_bases
from millrace.tables.collections.flush_tables import read_checkpoints, read_segments
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.tables.wal.trims import trimmed_totals
from tests.golden.deployment import LOG, rows, settings_of

ROOT = Path(__file__).resolve().parents[2]
Look = Callable[[Path], Any]
"""Reads what a folder says, as a value to compare."""


@dataclass(frozen=True)
class Kind:
    """One kind of file."""

    name: str
    folder: str
    """Below the root: what is copied for each flip."""
    files: str
    """Below that, as a glob."""
    look: Look
    answers: tuple[str, ...] = ("same", "error")
    """How the answers may begin: what docs/operating.md ("What a damaged file does") says of the kind."""
    verify: Look | None = None
    """Whether `millrace verify` finds all well."""


def log(folder: Path) -> Any:
    """All entries of all channels, and groups."""
    found: dict[str, Any] = {}
    with RocksMQ(folder, settings=RocksMQSettings(**LOG)) as service:
        for name in service.names():
            handle = service.open(name)
            described = handle.describe()
            entries, position = [], described.begin
            while position < described.end:
                run = handle.read(position, end=described.end)
                if not run.batch.num_rows:
                    break
                entries += run.batch.to_pylist()
                position = run.next
            handle.close()
            found[name] = (described.begin, described.end, entries)
        groups = {g: {name: service.group_position(g, name) for name in service.names()} for g in service.groups()}
    return found, groups


def settings_at(data: Path) -> Settings:
    return settings_of(data.parent, data.name)


def wal(data: Path) -> Any:
    table = WalTable.open(data / "wal")
    snapshot = WalSnapshot.open(data / "wal")
    assert snapshot is not None
    messages = {
        name: [part.drop_columns("detail").to_pylist() for part in snapshot.messages(name)]
        for name in table.pchannels()
    }
    return messages, {name: table.position(name).state for name in table.pchannels()}


def wal_holds(data: Path) -> Any:
    return all(each["holds"] for each in check_channels(settings_at(data), log=None))


def rejections(data: Path) -> Any:
    if not wal_holds(data):
        raise WalGap("as `millrace verify` says")


def collections(data: Path) -> Any:
    return [rows(settings_at(data), number, at=TICKS.get(number)) for number in (1, 3)]


def collections_hold(data: Path) -> Any:
    return all(each["holds"] for each in check_collections(settings_at(data)))


TICKS: dict[int, int] = {}
"""By collection a tick to read at."""


def flush_tables(data: Path) -> Any:
    settings = settings_at(data)
    checkpoints = read_checkpoints(open_table(Path(settings.checkpoints_uri)))
    segments = read_segments(open_table(Path(settings.segments_uri)))
    return {name: (each.time_tick, each.confirmed, each.catalog.to_bytes()) for name, each in checkpoints.items()}, (
        segments.to_pylist()
    )


def recovery(data: Path) -> Any:
    return {name: (each.state, each.totals) for name, each in recovery_checkpoints.newest(settings_at(data)).items()}


def trims(data: Path) -> Any:
    table = WalTable.open(data / "wal")
    return read_bases(data / "wal"), trimmed_totals(table)


def spool(folder: Path) -> Any:
    with Spool(folder) as found:
        return {name: list(channel.frames()) for name, channel in found.channels().items()}


def coordinator(folder: Path) -> Any:
    found = CatalogStore(folder / "coord.db")
    try:
        return found.pchannels(), found.collections(dropped=True), found.broadcasts.open_tasks()
    finally:
        found.close()


def consumers(folder: Path) -> Any:
    found = FilePositions(folder)
    try:
        return found.groups()
    finally:
        found.close()


def generations(folder: Path) -> Any:
    return GenerationFile(folder, "").generations


def tokens(folder: Path) -> Any:
    return TokenFile(folder.parent).tokens()


def parked(folder: Path) -> Any:
    return read_parked(folder)


def backup_manifest(folder: Path) -> Any:
    (found,) = [each for each in folder.iterdir() if each.name.startswith("backup-")]
    return BackupManifest.read(found)


def backup(folder: Path) -> Any:
    problems = verify_backup(folder).problems
    if problems:
        raise BackupDamaged(problems[0])


KINDS = [
    Kind("log: segments", "data/log", "generation-2/channels/*/*.log", lambda f: log(f / "generation-2")),
    Kind("log: manifest", "data/log", "generation-2/channels/*/manifest", lambda f: log(f / "generation-2")),
    Kind(
        "log: index (RocksDB)", "data/log", "generation-2/index/*", lambda f: log(f / "generation-2"), answers=("same",)
    ),
    Kind("log: positions of groups", "data/log", "groups/*/*", log, answers=("same", "other")),
    Kind("log: clock", "data/log", "generation-2/clock.json", lambda f: log(f / "generation-2"), answers=("same",)),
    Kind("log: list of generations", "data/log", "generations.json", generations),
    Kind("message streams", "streams", "channels/*/*", log),
    Kind(
        "wal: messages",
        "data",
        "wal/kind=message/**/*.parquet",
        wal,
        verify=wal_holds,
        answers=("same", "error", "verify", "untyped UnicodeDecodeError"),
    ),
    Kind("wal: rejections", "data", "wal/kind=rejection/**/*.parquet", rejections),
    Kind("wal: state", "data", "wal/kind=state/**/*.parquet", wal, verify=wal_holds),
    Kind(
        "wal: _delta_log",
        "data",
        "wal/_delta_log/*.json",
        wal,
        verify=wal_holds,
        answers=("same", "error", "verify", "torn", "untyped DeltaError"),
    ),
    Kind("collections", "data", "tables/[13]/_rows/**/*.parquet", collections, verify=collections_hold),
    Kind("deletes", "data", "deletes/[13]/**/*.parquet", collections, verify=collections_hold),
    Kind(
        "collections: _delta_log",
        "data",
        "tables/[13]/_rows/_delta_log/*.json",
        collections,
        verify=collections_hold,
        answers=("same", "error", "verify", "torn", "untyped DeltaError"),
    ),
    Kind("staged files", "data", "staged/**/*.parquet", lambda f: check_collections(settings_at(f))),
    Kind("checkpoints", "data", "checkpoints/**/*.parquet", flush_tables),
    Kind("segments", "data", "segments/**/*.parquet", flush_tables),
    Kind("recovery_checkpoints", "data", "recovery_checkpoints/**/*.parquet", recovery),
    Kind("bases", "trimmed/data", "bases/**/*.parquet", trims),
    Kind("wal_trims", "trimmed/data", "wal_trims/**/*.parquet", trims),
    Kind("spool", "spool", "*/*.spool", spool, answers=("same", "error SPOOL_CORRUPTED", "other")),
    Kind("coord.db", "data/coord", "coord.db", coordinator, answers=("same", "other", "error", "untyped")),
    Kind("consumers.db", "data/coord", "consumers.db", consumers, answers=("same", "other", "untyped")),
    Kind("tokens", "data/access", "tokens.json", tokens, answers=("same", "error TOKEN_FILE_REFUSED")),
    Kind("parked", "data/parked", "*.json", parked, answers=("same", "other")),
    Kind("backup: manifest", "backups", "*/manifest.json", backup_manifest),
    Kind("backup: files", "backups", "*/data/**/*.parquet", backup),
]


FOOTERS = "footers of Parquet files"


def flips(root: Path, kind: Kind, count: int) -> Iterator[tuple[str, int]]:
    """Files below the kind's folder with places in them.

    `count` in all, the beginnings and the ends always among them.
    """
    folder = root / kind.folder
    files = sorted(path for path in folder.glob(kind.files) if path.is_file() and path.stat().st_size)
    assert files, f"no file of the kind {kind.name}"
    dice = random.Random(kind.name)
    chosen = files if len(files) <= 4 else [files[0], files[-1], *dice.sample(files[1:-1], 2)]
    for path in chosen:
        size, each = path.stat().st_size, max(4, count // len(chosen))
        places = {0, size - 1, *(dice.randrange(size) for _ in range(each - 2))} if size > each else set(range(size))
        for place in sorted(places):
            yield str(path.relative_to(folder)), place


def answer(root: Path, kind: Kind, file: str, place: int, scratch: Path, sound: Any) -> str:
    """What reading says once one bit of a file is flipped."""
    shutil.rmtree(scratch, ignore_errors=True)
    copy = scratch / Path(kind.folder).name
    shutil.copytree(root / kind.folder, copy, symlinks=True)  # a link by name may lead nowhere yet
    path = copy / file
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << (place % 8)
    path.write_bytes(data)
    try:
        found = kind.look(copy)
    except MillraceError as error:
        return f"error {error.code}"
    except Exception as error:
        return f"untyped {type(error).__name__}: {str(error)[:80]}"
    if found == sound:
        return "same"
    if any(copy.rglob("_delta_log/.torn-*")):
        return "torn"  # the end of the newest commit: that one was moved aside
    if kind.verify is not None:
        try:
            with suppress(MillraceError):
                return "other" if kind.verify(copy) else "verify"
            return "verify"
        except Exception as error:
            return f"untyped {type(error).__name__}: {str(error)[:80]}"
    return "other"


def in_footer(path: Path, place: int) -> bool:
    """Whether a place lies in the footer of a Parquet file, which no checksum covers."""
    data = path.read_bytes()
    return data[-4:] == b"PAR1" and place >= len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def worker(root: Path, scratch: Path, count: int) -> None:
    """Answers line by line, behind those that an earlier worker gave.

    Arrow may end the process over a garbled footer.
    """
    given = scratch / "answers.jsonl"
    known = [json.loads(line) for line in given.read_text().splitlines()] if given.exists() else []
    with given.open("a") as out:
        for kind in KINDS:
            done = sum(1 for name, _, _, words in known if name == kind.name and words != "begun")
            sound: Any = None
            for file, place in list(flips(root, kind, count))[done:]:
                if sound is None:
                    sound = _sound(root, kind, scratch)
                out.write(json.dumps([kind.name, file, place, "begun"]) + "\n")
                out.flush()
                out.write(
                    json.dumps([kind.name, file, place, answer(root, kind, file, place, scratch / "one", sound)]) + "\n"
                )
                out.flush()


def _sound(root: Path, kind: Kind, scratch: Path) -> Any:
    copy = scratch / "sound" / Path(kind.folder).name
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(root / kind.folder, copy, symlinks=True)  # a link by name may lead nowhere yet
    return kind.look(copy)


def answers(root: Path, scratch: Path, count: int) -> dict[str, Counter[str]]:
    """By kind how often each answer came, of about `count` flips each.

    ``aborted`` where the process that read it died.
    """
    given = scratch / "answers.jsonl"
    found: dict[str, Counter[str]] = {name: Counter() for name in (*(kind.name for kind in KINDS), FOOTERS)}
    while True:
        command = [sys.executable, "-m", "tests.golden.flips", str(root), str(scratch), str(count)]
        code = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, check=False, env=_environment())
        if code.returncode == 0:
            break
        *_, (kind, file, place, words) = [json.loads(line) for line in given.read_text().splitlines()]
        assert words == "begun", code.stderr.decode()[-2000:]
        assert code.returncode < 0, code.stderr.decode()[-2000:]
        with given.open("a") as out:
            out.write(json.dumps([kind, file, place, "aborted"]) + "\n")
    for line in given.read_text().splitlines():
        kind, file, place, words = json.loads(line)
        if words != "begun":
            [folder] = [each.folder for each in KINDS if each.name == kind]
            found[FOOTERS if in_footer(root / folder / file, place) else kind][words] += 1
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "include"), str(ROOT)])}


if __name__ == "__main__":
    at, scratch, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for read in json.loads((at / "facts.json").read_text())["reads"]:
        if read["rows"] is not None:
            TICKS[read["collection"]] = read["at"]
    os.chdir(at)  # the log's second generation has a relative URL
    worker(at, scratch, count)
