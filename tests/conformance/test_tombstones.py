"""An entry that was replaced by a tombstone, on every backend.

The same bytes under its id for every reader, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.log.generations.service import GenerationsService
from millrace.message.ids import EARLIEST, LogId
from millrace.message.tombstones import Tombstone, entry_sha256
from millrace.node.append.host import AppendHost
from millrace.node.append.server import committed_state_loader
from millrace.node.append.tombstones import TombstonePlacer
from millrace.node.ingest.definition import ingest_to_end
from millrace.tables.wal.table import WalTable
from tests.conformance.backends import BACKENDS, PARAMETERS
from tests.conformance.reading import read_all
from tests.node.log_samples import accepted, opening, poison

P = "dml_0"


def open_over(backend: str, folder: Path) -> GenerationsService:
    """The backend of a directory as a deployment has it: below the list of generations, which holds the tombstones."""
    service = BACKENDS[backend](folder / "log")
    if isinstance(service, GenerationsService):
        return service
    return GenerationsService(folder / "list", open_backend=lambda url: service)


@pytest.fixture
def service(backend: str, tmp_path: Path) -> Iterator[GenerationsService]:
    with open_over(backend, tmp_path) as opened:
        opened.create(P)
        yield opened


def bury(service: GenerationsService, entry: LogId, value: bytes, *, placed: bool = True) -> Tombstone:
    tombstone = Tombstone(P, entry, entry_sha256(value), "ada", f"it is {entry}", "2026-11-23T07:00:00+00:00", placed)
    service.file.change(lambda list_: list_.with_tombstone(tombstone))
    return tombstone


def test_it_stands_in_the_entrys_place_however_it_is_read_and_across_a_restart(
    service: GenerationsService, backend: str, tmp_path: Path
) -> None:
    values = [b"", b"first", b"x" * 5000, *(b"%d" % number for number in range(40)), b"", b"last"]
    with closing(service.open(P)) as log:
        ids = [each for value in values for each in log.append([value])]
        ids += log.append(values)
        stored = dict(zip(ids, values * 2, strict=True))
        assert read_all(log) == list(stored.items())
        stamps = log.read(EARLIEST, max_bytes=64 << 20).batch["physical_ms"].to_pylist()
        for place in (0, 2, 7, 8, len(values) - 1, len(values), len(values) + 20, 2 * len(values) - 1):
            bury(service, ids[place], stored[ids[place]])
        standing = service.file.generations.tombstones[P]
        seen = {at: standing[at].value if at in standing else value for at, value in stored.items()}
        for size in (1, 300, 64 << 20):
            assert read_all(log, max_bytes=size) == list(seen.items())
        for place in range(0, len(ids), 5):
            assert read_all(log, ids[place], end=ids[-1]) == list(seen.items())[place:-1]
        assert [log.read_stored(each)[0] for each in ids] == list(stored.values()), "the log itself holds what it held"
        assert log.read(EARLIEST, max_bytes=64 << 20).batch["physical_ms"].to_pylist() == stamps
    service.close()
    with open_over(backend, tmp_path) as again, closing(again.open(P)) as log:
        assert read_all(log) == list(seen.items())


def test_while_it_is_proposed_reads_end_before_it(service: GenerationsService) -> None:
    with closing(service.open(P)) as log:
        ids = log.append([b"a", b"b", b"c"])
        bury(service, ids[1], b"b", placed=False)
        assert read_all(log, end=ids[1]) == [(ids[0], b"a")]
        run = log.read(EARLIEST)
        assert run.next == ids[1]
        with pytest.raises(LogUnavailable):
            log.read(run.next)
        assert read_all(log, ids[2]) == [(ids[2], b"c")]


def test_truncation_forgets_it(service: GenerationsService) -> None:
    with closing(service.open(P)) as log:
        ids = [log.append([b"%d" % number])[0] for number in range(3)]
        for each in ids[:2]:
            bury(service, each, b"%d" % ids.index(each))
        log.truncate(ids[1])
        assert set(service.file.generations.tombstones[P]) == {ids[1]}
        log.truncate(ids[2])
        assert not service.file.generations.tombstones
        assert read_all(log, ids[2]) == [(ids[2], b"2")]


# Logs that are switched under way pass to another backend without the AlterWAL entry that tells the chain.
@pytest.mark.parametrize(
    "backend", [each for each in PARAMETERS if each != "rocksmq switched under way"], indirect=True
)
def test_a_parked_pchannel_goes_on(service: GenerationsService, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    Path(settings.wal_uri).parent.mkdir(parents=True, exist_ok=True)
    with (
        closing(service.open(P)) as log,
        AppendHost(service, committed_state_loader(Path(settings.wal_uri), service)) as host,
    ):
        log.append([opening(), accepted()])
        (entry,) = log.append([poison()])
        tombstones = TombstonePlacer(host, service, lambda: settings.wal_uri)
        seen = tombstones.inspect(P, entry)
        placed = tombstones.place(P, entry, sha256=seen["sha256"], author="ada", reason="INC-1")
        host.restart(P)
        assert host.append(P, accepted()).rejected == 0
        ingest_to_end(settings, service)
        position = WalTable.open(Path(settings.wal_uri)).position(P)
        assert (position.totals.messages, position.totals.rejections) == (3, 1)
        assert dict(read_all(log))[entry] == placed.value
