"""A load: the staged slices of a collection appended, each as one transaction that takes effect once.

A slice has a producer of its own, whose id follows from the import's name and the slice's number, and sends Begin, its rows
and Commit under the sequences 0, 1, 2, ... So a slice that is sent again, wholly or in part, has no second effect (law 8), and
its rows become visible together, at its Commit (law 4). Where the transaction died before its Commit (its lease ran out, a flush
or DDL ended it), the slice starts over in the producer's next epoch; the old attempt's rows are never visible.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final, TypedDict

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.client.client import Client
from millrace.client.framing import ENTRY_BYTES
from millrace.coord.store import Collection, pchannel_of
from millrace.errors import AppendRejected, DeadlineExceeded, InvalidArgument, MillraceError
from millrace.message import builders
from millrace.message.model import MutableMessage
from millrace.message.wire import encode_entry
from millrace.node.append_host_outcome import AppendOutcome, AppendResult
from millrace.ops.backfill.params import LoadParams
from millrace.ops.backfill.staging import Manifest, StagedSlice, digest_of, stage, staged_path
from millrace.ops.operation import OperationReport, Progress, write_json
from millrace.settings import Settings
from millrace.tables.fsync import sync
from millrace.tables.wal_reader import WalSnapshot
from millrace.wal.reasons import Reason

KEEPALIVE_MS: Final = 600_000
"""Lease of a slice's transaction: outlasts the restart of a task."""

EPOCHS: Final = 5
"""Transactions of one slice that may die in one run before the task gives up (and may be tried again)."""

TERMS: Final = 5

_DEAD: Final = frozenset({Reason.TXN_EXPIRED, Reason.TXN_NOT_ACTIVE, Reason.TXN_NOT_FOUND})
_TERM: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})


class LoadedSlice(OperationReport):
    """One slice that stands."""

    number: int
    vchannel: str
    rows: int
    time_tick: int
    """From which on its rows are visible."""


class LoadReport(OperationReport):
    """What a load did."""

    import_id: str
    collection: str
    dry_run: bool
    slices: list[int]
    """All slices of the load."""
    rows: int
    loaded: list[LoadedSlice]
    """Those that stand now, of the ones that were asked for."""
    time_tick: int
    """At which all of `loaded` are visible."""


class _Where(TypedDict):
    """What all messages of a slice say of their place; the term is stamped as they are sent."""

    vchannel: str
    collection_id: int
    term: int


class _TxnDied(Exception):
    """The slice's transaction ended without its Commit."""


def run(settings: Settings, params: LoadParams, progress: Progress) -> LoadReport:
    """Stage, load and clean up, or one of these steps.

    Raises InvalidArgument (a row, a file, a partition that does not fit; nothing is appended then), CollectionNotFound,
    AppendRejected where the chain refuses a message, LogUnavailable.
    """
    with Client.connect(settings) as client:
        collection = client.collection(params.collection)
        manifest = _manifest(settings, params, collection, progress)
        folder = staged_path(settings, manifest.import_id)
        wanted = list(range(len(manifest.slices))) if params.slices is None else params.slices
        loaded: list[LoadedSlice] = []
        if not params.dry_run and params.step in ("all", "load"):
            loaded = _load(client, collection, manifest, folder, wanted, params, progress)
        if not params.dry_run and (params.step == "finish" or (params.step == "all" and params.slices is None)):
            for each in manifest.slices:
                (folder / each.file).unlink(missing_ok=True)
    return LoadReport(
        import_id=manifest.import_id,
        collection=manifest.collection,
        dry_run=params.dry_run,
        slices=list(range(len(manifest.slices))),
        rows=manifest.rows,
        loaded=loaded,
        time_tick=max((each.time_tick for each in loaded), default=0),
    )


def _manifest(settings: Settings, params: LoadParams, collection: Collection, progress: Progress) -> Manifest:
    if params.step in ("all", "stage"):
        return stage(settings, params, collection, progress)
    found = Manifest.read(staged_path(settings, params.import_id)) if params.import_id else None
    if found is None or found.collection_id != collection.id:
        raise InvalidArgument(
            f"nothing is staged for {collection.name} as {params.import_id!r}: run the step stage first"
        )
    return found


def _load(
    client: Client,
    collection: Collection,
    manifest: Manifest,
    folder: Path,
    wanted: Sequence[int],
    params: LoadParams,
    progress: Progress,
) -> list[LoadedSlice]:
    if any(not 0 <= number < len(manifest.slices) for number in wanted):
        raise InvalidArgument(f"the import {manifest.import_id} has the slices 0 to {len(manifest.slices) - 1}")
    loaded: list[LoadedSlice] = []
    workers = params.parallel or client.settings.backfill_parallel
    with ThreadPoolExecutor(workers, thread_name_prefix="load") as pool:
        futures = [pool.submit(_load_slice, client, collection, manifest, folder, number) for number in wanted]
        try:
            for future in as_completed(futures):
                loaded.append(future.result())
                rows = sum(each.rows for each in loaded)
                progress.say(f"{len(loaded)} of {len(wanted)} slices", done=len(loaded) / len(wanted), rows=rows)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted(loaded, key=lambda each: each.number)


def _load_slice(client: Client, collection: Collection, manifest: Manifest, folder: Path, number: int) -> LoadedSlice:
    """Append one slice until it stands; at once where it is known to."""
    staged = manifest.slices[number]
    known = folder / f"{staged.file}.json"
    if known.exists():
        state: dict[str, Any] = json.loads(known.read_text())
        if "time_tick" not in state:
            state |= _committed(client.settings, manifest, number, state)
    else:
        wal = WalSnapshot.open(client.settings.wal_path)
        state = {"epoch": 1, "since": 0 if wal is None else wal.last_tick(pchannel_of(staged.vchannel))}
    for _ in range(EPOCHS):
        _note(known, state)  # before the first append of an epoch: a restart knows which it may have begun
        if "time_tick" in state:
            return LoadedSlice(number=number, vchannel=staged.vchannel, rows=staged.rows, time_tick=state["time_tick"])
        try:
            sender = _Sender(client, collection, manifest, number, state["epoch"])
            state["time_tick"] = sender.send(folder / staged.file)
        except _TxnDied:
            state["epoch"] += 1
    _note(known, state)
    if "time_tick" in state:
        return LoadedSlice(number=number, vchannel=staged.vchannel, rows=staged.rows, time_tick=state["time_tick"])
    raise DeadlineExceeded(
        f"slice {number}: its transaction was ended {EPOCHS} times (by flushes or DDL, or it took too long); run it again, or"
        " take smaller slices"
    )


def _note(path: Path, state: dict[str, Any]) -> None:
    write_json(path, state)
    sync(path)
    sync(path.parent)


def _committed(settings: Settings, manifest: Manifest, number: int, state: dict[str, Any]) -> dict[str, int]:
    """By the WAL: the Commit of a slice that was begun and did not note its end. Nothing where the WAL has none.

    The chain forgets producers that idle among many others, and would take a slice that stands for a new one. What it
    forgot is long in the WAL; what is not in the WAL yet, it remembers.
    """
    wal = WalSnapshot.open(settings.wal_path)
    if wal is None:
        return {}
    mine = pa.array([_txn_id(manifest, number, epoch) for epoch in range(1, state["epoch"] + 1)], pa.int64())
    pchannel = pchannel_of(manifest.slices[number].vchannel)
    columns = ["txn_id", "time_tick"]
    for rows in wal.messages(pchannel, after_tick=state["since"], types=["COMMIT_TXN"], columns=columns):
        for tick in rows.filter(pc.is_in(rows["txn_id"], mine))["time_tick"].to_pylist():
            return {"time_tick": tick}
    return {}


def _txn_id(manifest: Manifest, number: int, epoch: int) -> int:
    return _number("txn", manifest.import_id, manifest.collection_id, number, epoch)


class _Sender:
    """One attempt to bring one slice in: the messages of one epoch of its producer."""

    def __init__(self, client: Client, collection: Collection, manifest: Manifest, number: int, epoch: int) -> None:
        self._client = client
        self._collection = collection
        self._manifest = manifest
        self._slice: StagedSlice = manifest.slices[number]
        self._epoch = epoch
        self._producer = _number("producer", manifest.import_id, manifest.collection_id, number)
        self._txn = _txn_id(manifest, number, epoch)
        self._pchannel = pchannel_of(self._slice.vchannel)
        self._term = client.coordinator.term(self._pchannel)

    def send(self, path: Path) -> int:
        """The tick of the Commit. Raises _TxnDied, AppendRejected, InvalidArgument where the staged file is another."""
        if not path.exists() or digest_of(path) != self._slice.digest:
            raise InvalidArgument(
                f"{path} is not the file that was staged: remove {path.parent} and load again under another import id"
            )
        tick = 0
        for group in self._entries(self._messages(path)):
            tick = max(tick, self._append(group))
        return tick

    def _messages(self, path: Path) -> Iterator[MutableMessage]:
        where = _Where(vchannel=self._slice.vchannel, collection_id=self._collection.id, term=0)
        yield builders.begin_txn(self._txn, keepalive_ms=KEEPALIVE_MS, **where)
        file = pq.ParquetFile(path)
        for place, partition in enumerate(self._slice.partitions):
            (rows,) = file.read_row_group(place).combine_chunks().to_batches()
            yield builders.insert(
                rows.replace_schema_metadata(None),
                partition_id=partition,
                schema_version=self._manifest.schema_version,
                txn_id=self._txn,
                **where,
            )
        yield builders.commit_txn(self._txn, **where)

    def _entries(self, messages: Iterator[MutableMessage]) -> Iterator[list[MutableMessage]]:
        """Messages with their sequences, in entries; the Commit alone in the last, so that it comes when all else is judged."""
        group: list[MutableMessage] = []
        size = 0
        last = len(self._slice.partitions) + 1
        for sequence, message in enumerate(messages):
            if group and (size + len(message.payload) > ENTRY_BYTES or sequence == last):
                yield group
                group, size = [], 0
            group.append(message.with_(producer_id=self._producer, epoch=self._epoch, sequence=sequence))
            size += len(message.payload)
        yield group

    def _append(self, group: list[MutableMessage]) -> int:
        """Append one entry until its messages are judged in the term that is open; the greatest tick among them."""
        for _ in range(TERMS):
            entry = encode_entry([message.with_(term=self._term) for message in group])
            judged = list(self._retried(entry).judged())
            reasons = {each.reason for each in judged if isinstance(each, AppendRejected)}
            if not reasons & _TERM:
                return self._tick(judged)
            self._term = self._client.coordinator.term(self._pchannel)
        raise DeadlineExceeded(f"{self._pchannel} changed its term {TERMS} times in a row: run the slice again")

    def _retried(self, entry: bytes) -> AppendOutcome:
        """The same bytes again where the answer was lost: the sequences in them make that harmless."""
        settings = self._client.settings
        for left in reversed(range(settings.append_attempts)):
            try:
                return self._client.append.append(self._pchannel, [entry], deadline=settings.append_deadline)
            except MillraceError as error:
                if not error.retriable or not left:
                    raise
            time.sleep(settings.append_retry_delay)
        raise AssertionError("append_attempts is at least 1")

    def _tick(self, judged: Sequence[AppendResult | AppendRejected]) -> int:
        tick = 0
        for each in judged:
            if isinstance(each, AppendResult):
                tick = max(tick, each.time_tick)
            elif each.reason in _DEAD:
                raise _TxnDied
            elif each.reason != Reason.ALREADY_APPLIED:
                raise each
        return tick


def _number(*parts: object) -> int:
    """A positive number below 2**62 that follows from `parts`."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return (int.from_bytes(digest[:8]) >> 2) | 1
