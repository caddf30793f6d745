"""Staged slices become Import messages, each with one effect however often this is repeated.

An import has a producer of its own on each VChannel, whose id follows from its name; its slices are the sequences 0, 1, 2, ...
So what is sent again has no second effect (law 8). The chain forgets producers that idle among many others, and would take a slice
that stands for a new one: therefore what an earlier attempt may have sent is looked for in the WAL first. What the chain
forgot is long in there; what is not in there yet, the chain remembers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, DeadlineExceeded, InvalidArgument, MillraceError
from millrace.base.failpoint import hit
from millrace.base.files import replace_json, sha256_file
from millrace.base.settings import Settings
from millrace.catalog.collection import pchannel_of
from millrace.client.client import Client
from millrace.client.produce.rows import ENTRY_BYTES
from millrace.message import builders
from millrace.message.bodies import parse_body
from millrace.message.model import MutableMessage
from millrace.message.types import MIN_CHAIN_VERSION, MessageType
from millrace.message.wire.encode import encode_entry
from millrace.operations.backfill.staging_folder import StagingManifest, staged_folder
from millrace.rpc.outcome import AppendOutcome, AppendResult
from millrace.runtime.progress import Progress
from millrace.tables.collections.staged_files import sync_staged_files
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.reasons import Reason

STATE_FILE: Final = "appended.json"
MAX_TERM_CHANGES: Final = 5
"""Terms that may change under one append before it is given up."""
MAX_EPOCHS: Final = 5
_TERM: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})


@dataclass(frozen=True, slots=True)
class AppendedSlice:
    """One slice that stands."""

    number: int
    vchannel: str
    rows: int
    time_tick: int
    """From which on its rows are visible."""


def append_imports(
    client: Client,
    manifest: StagingManifest,
    *,
    replace: bool = False,
    all_vchannels: Sequence[str] = (),
    progress: Progress,
) -> list[AppendedSlice]:
    """Append one Import for each slice of `manifest`, and with `replace` one for each VChannel of `everywhere` without a slice.

    May be killed at any instant and repeated. Raises InvalidArgument where a staged file is another one, AppendRejected where
    the chain refuses (a partition or the collection was dropped), LogUnavailable, DeadlineExceeded.
    """
    folder = staged_folder(client.settings, manifest.import_id)
    state = _State(folder / STATE_FILE)
    missing = [number for number in range(len(manifest.slices)) if number not in state.ticks]
    _check(client.settings, manifest, missing)
    by_vchannel: dict[str, list[int]] = {name: [] for name in all_vchannels}
    for number, each in enumerate(manifest.slices):
        by_vchannel.setdefault(each.vchannel, []).append(number)
    found: list[AppendedSlice] = []
    for done, (vchannel, numbers) in enumerate(sorted(by_vchannel.items())):
        progress.update("appending", done=done / len(by_vchannel), slices=len(found))
        found += _Sender(client, manifest, vchannel, numbers, replace, state).send()
        hit("import.appended")
    return sorted(found, key=lambda each: (each.number, each.vchannel))


def _check(settings: Settings, manifest: StagingManifest, missing: Sequence[int]) -> None:
    """What will be named must be there, as it was staged, and durable."""
    files = [file for number in missing for file in manifest.slices[number].files]
    for file in files:
        path = settings.staged_path / file["path"]
        if not path.exists() or sha256_file(path) != file["digest"]:
            raise InvalidArgument(
                f"{path} is not the file that was staged: remove {path.parent} and load again under another import id"
            )
    sync_staged_files(settings.staged_path, files)


@dataclass(slots=True)
class _Plan:
    """What was, or is about to be, sent to one VChannel."""

    since: int
    """Of the WAL, its last tick before anything was sent."""
    epoch: int
    numbers: list[int]
    """The slices, in the order of their sequences in this epoch."""


class _State:
    """What is known of an import's messages, kept beside its files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            value: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            value = {"plans": {}, "ticks": {}}
        self.plans = {name: _Plan(**plan) for name, plan in value["plans"].items()}
        """By VChannel."""
        self.ticks: dict[int, int] = {int(number): tick for number, tick in value["ticks"].items()}
        """By slice that stands."""

    def keep(self) -> None:
        plans = {name: asdict(plan) for name, plan in self.plans.items()}
        ticks = {str(each): tick for each, tick in self.ticks.items()}
        replace_json(self._path, {"plans": plans, "ticks": ticks}, synced=True)


class _Sender:
    """The Imports of one VChannel."""

    def __init__(
        self,
        client: Client,
        manifest: StagingManifest,
        vchannel: str,
        numbers: Sequence[int],
        replace: bool,
        state: _State,
    ) -> None:
        self._client = client
        self._manifest = manifest
        self._vchannel = vchannel
        self._pchannel = pchannel_of(vchannel)
        self._replace = replace
        self._state = state
        # A VChannel without rows has one message all the same; its number is none of a slice.
        self._numbers = list(numbers) or [-1 - int(vchannel.rpartition("v")[2])]

    def send(self) -> list[AppendedSlice]:
        """Each message's tick, once all of them stand."""
        state, ticks = self._state, self._state.ticks
        if self._missing():
            self._newest_chain()
            plan = state.plans.get(self._vchannel)
            if plan is None:
                wal = WalSnapshot.open(self._client.settings.wal_uri)
                plan = _Plan(0 if wal is None else wal.last_tick(self._pchannel), 1, self._numbers)
                self._keep(plan)  # before the first append: a restart knows that there may be something to look for
            else:
                ticks |= self._in_wal(plan.since)
            hit("import.noted")
            for _ in range(MAX_EPOCHS):
                if self._sent(plan):
                    break
                # The chain knows nothing of this import any more. What it knew is in the WAL; the rest begins anew.
                ticks |= self._in_wal(plan.since)
                plan = _Plan(plan.since, plan.epoch + 1, self._missing())
                self._keep(plan)
            else:
                raise DeadlineExceeded(f"{self._vchannel}: the chain forgets this import's producer: run it again")
            state.keep()
        return [AppendedSlice(number, self._vchannel, self._rows(number), ticks[number]) for number in self._numbers]

    def _missing(self) -> list[int]:
        return [number for number in self._numbers if number not in self._state.ticks]

    def _keep(self, plan: _Plan) -> None:
        self._state.plans[self._vchannel] = plan
        self._state.keep()

    def _rows(self, number: int) -> int:
        return self._manifest.slices[number].rows if number >= 0 else 0

    def _files(self, number: int) -> list[Any]:
        return list(self._manifest.slices[number].files) if number >= 0 else []

    def _newest_chain(self) -> None:
        """Imports are known from one version of the chain on: a term that runs an older one is followed by another."""
        if self._client.append.describe(self._pchannel)["chain_version"] < MIN_CHAIN_VERSION[MessageType.IMPORT]:
            self._client.catalog.open_term(self._pchannel)

    def _in_wal(self, since: int) -> dict[int, int]:
        """By number, the ticks of this import's messages that the WAL has behind `since`."""
        wal = WalSnapshot.open(self._client.settings.wal_uri)
        if wal is None:
            return {}
        place = {tuple(file["path"] for file in self._files(number)): number for number in self._numbers}
        found = {}
        for rows in wal.messages(self._pchannel, after_tick=since, types=[MessageType.IMPORT.name]):
            mine = rows.filter(pc.equal(rows["vchannel"].cast(pa.utf8()), self._vchannel))
            for row in mine.select(["payload", "time_tick"]).to_pylist():
                body = parse_body(MessageType.IMPORT, row["payload"])
                number = place.get(tuple(file["path"] for file in body["files"]))
                if body["import_id"] == self._manifest.import_id and number is not None:
                    found[number] = row["time_tick"]
        return found

    def _sent(self, plan: _Plan) -> bool:
        """Whether all that is missing was taken; False where the chain has forgotten the producer."""
        missing = [
            (number, self._message(number, plan.epoch, sequence))
            for sequence, number in enumerate(plan.numbers)
            if number not in self._state.ticks
        ]
        for group in _entries(missing):
            for (number, _), judged in zip(group, self._judged([message for _, message in group]), strict=True):
                if isinstance(judged, AppendResult):
                    self._state.ticks[number] = judged.time_tick
                elif judged.reason == Reason.UNKNOWN_PRODUCER:
                    return False
                elif judged.reason == Reason.ALREADY_APPLIED:
                    self._state.ticks[number] = self._applied(number, plan.since)
                else:
                    raise judged
        return True

    def _applied(self, number: int, since: int) -> int:
        """The tick of a slice whose result the chain no longer keeps: the WAL has it, or will have in a moment."""
        end = Deadline.after(self._client.settings.read_deadline)
        while True:
            found = self._in_wal(since)
            if number in found:
                return found[number]
            if not end.pause(0.05):
                raise DeadlineExceeded(
                    f"slice {number} stands, and the WAL does not have it yet: start the streaming node, and run this again"
                )

    def _message(self, number: int, epoch: int, sequence: int) -> MutableMessage:
        manifest = self._manifest
        return builders.import_files(
            manifest.import_id,
            self._files(number),
            vchannel=self._vchannel,
            collection_id=manifest.collection_id,
            term=0,
            replace=self._replace,
            schema_version=manifest.schema_version,
            producer_id=_producer(manifest.import_id, manifest.collection_id, self._vchannel),
            epoch=epoch,
            sequence=sequence,
        )

    def _judged(self, group: Sequence[MutableMessage]) -> list[AppendResult | AppendRejected]:
        """Append one entry until its messages are judged in the term that is open."""
        for _ in range(MAX_TERM_CHANGES):
            term = self._client.catalog.term(self._pchannel)
            judged = list(
                self._retried(encode_entry([replace(message, term=term) for message in group])).message_outcomes()
            )
            if not {each.reason for each in judged if isinstance(each, AppendRejected)} & _TERM:
                return judged
        raise DeadlineExceeded(f"{self._pchannel} changed its term {MAX_TERM_CHANGES} times in a row: run this again")

    def _retried(self, entry: bytes) -> AppendOutcome:
        """The same bytes again where the answer was lost: the sequences in them make that harmless."""
        settings = self._client.settings
        for left in reversed(range(settings.append_attempts)):
            try:
                return self._client.append.append(self._pchannel, [entry], deadline=settings.append_deadline)
            except MillraceError as error:
                if not error.retriable or not left:
                    raise
            time.sleep(jittered(settings.append_retry_delay))
        raise AssertionError("append_attempts is at least 1")


def _entries(messages: list[tuple[int, MutableMessage]]) -> list[list[tuple[int, MutableMessage]]]:
    """Messages in groups of about an entry's size, at least one each."""
    groups: list[list[tuple[int, MutableMessage]]] = []
    size = ENTRY_BYTES
    for each in messages:
        if size + len(each[1].payload) > ENTRY_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += len(each[1].payload)
    return groups


def _producer(*parts: object) -> int:
    """A positive number below 2**62 that follows from `parts`."""
    digest = hashlib.sha256("/".join(str(part) for part in ("producer", *parts)).encode()).digest()
    return (int.from_bytes(digest[:8]) >> 2) | 1
