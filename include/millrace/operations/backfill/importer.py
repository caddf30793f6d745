"""Append staged slices as Import messages. Repeating an import is idempotent.

An import has its own producer on each VChannel, whose id is derived from the import id. Its slices are the sequences 0,
1, 2, ..., so appending one again has no second effect (law 8).

The chain forgets idle producers when there are many others, and would then accept a slice a second time. Therefore an
earlier attempt's messages are first looked up in the WAL. A producer that the chain forgot has its messages in the WAL
for long; a message not in the WAL yet is one that the chain still remembers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, DeadlineExceeded, InvalidArgument
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.client.produce.lane import deliver_single
from millrace.client.produce.rows import ENTRY_BYTES
from millrace.message import builders
from millrace.message.bodies import parse_body
from millrace.message.ids import pchannel_of
from millrace.message.model import MutableMessage
from millrace.message.types import MIN_CHAIN_VERSION, MessageType
from millrace.message.wire.encode import encode_entry
from millrace.operations.backfill.staging_folder import MANIFEST, StagingManifest, staged_folder
from millrace.rpc.outcome import AppendOutcome, AppendResult
from millrace.runtime.progress import Progress
from millrace.storage.store import TableStore
from millrace.tables.collections.staged_files import StagedFiles, staged_digest, sync_staged_files
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.reasons import Reason

STATE_FILE: Final = "appended.json"
MAX_TERM_CHANGES: Final = 5
"""Term changes during one append after which it fails."""
MAX_EPOCHS: Final = 5
_TERM: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})


@dataclass(frozen=True, slots=True)
class AppendedSlice:
    """One appended slice."""

    number: int
    vchannel: str
    rows: int
    time_tick: int
    """Tick from which its rows are visible."""


def append_imports(
    client: Database,
    manifest: StagingManifest,
    *,
    replace: bool = False,
    all_vchannels: Sequence[str] = (),
    progress: Progress,
) -> list[AppendedSlice]:
    """Append one Import per slice of `manifest`.

    With `replace`, also one per VChannel of `all_vchannels` without a slice.

    May be killed at any time and repeated.

    Raises InvalidArgument if a staged file was altered, AppendRejected if the chain rejects a message (its partition or
    collection was dropped), LogUnavailable, DeadlineExceeded.
    """
    folder = staged_folder(client.settings, manifest.import_id)
    state = _State(folder)
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
    """Check that the files to be named exist, are unchanged since staging, and are durable."""
    files = [file for number in missing for file in manifest.slices[number].files]
    place = StagedFiles.of(settings).place_of(f"{manifest.import_id}/{MANIFEST}")
    for file in files:
        if staged_digest(place, file["path"]) != file["digest"]:
            path = f"{place}/{file['path']}"
            raise InvalidArgument(
                f"{path} is not the file that was staged: remove {path.rpartition('/')[0]} and load again with another"
                " import_id"
            )
    sync_staged_files(place, files)


@dataclass(slots=True)
class _Plan:
    """The messages to one VChannel that were sent, or are about to be sent."""

    since: int
    """Last tick of the WAL before anything was sent."""
    epoch: int
    numbers: list[int]
    """Slices in the order of their sequences in this epoch."""


class _State:
    """The record of an import's messages, stored beside its files."""

    def __init__(self, folder: TableStore) -> None:
        self._folder = folder
        text = folder.read(STATE_FILE)
        value: dict[str, Any] = {"plans": {}, "ticks": {}} if text is None else json.loads(text)
        self.plans = {name: _Plan(**plan) for name, plan in value["plans"].items()}
        """Plans by VChannel."""
        self.ticks: dict[int, int] = {int(number): tick for number, tick in value["ticks"].items()}
        """Ticks by appended slice."""

    def keep(self) -> None:
        plans = {name: asdict(plan) for name, plan in self.plans.items()}
        ticks = {str(each): tick for each, tick in self.ticks.items()}
        self._folder.replace(STATE_FILE, json.dumps({"plans": plans, "ticks": ticks}).encode())


class _Sender:
    """Appends the Imports of one VChannel."""

    def __init__(
        self,
        client: Database,
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
        # A VChannel without rows still gets one message. A negative number keeps it apart from the slices.
        self._numbers = list(numbers) or [-1 - int(vchannel.rpartition("v")[2])]

    def send(self) -> list[AppendedSlice]:
        """Append what is missing and return every slice with its tick."""
        state, ticks = self._state, self._state.ticks
        if self._missing():
            self._newest_chain()
            plan = state.plans.get(self._vchannel)
            if plan is None:
                wal = WalSnapshot.open(self._client.settings.wal_uri)
                plan = _Plan(0 if wal is None else wal.last_tick(self._pchannel), 1, self._numbers)
                # Write the plan before the first append, so that a restart knows that messages may exist.
                self._keep(plan)
            else:
                ticks |= self._in_wal(plan.since)
            hit("import.noted")
            for _ in range(MAX_EPOCHS):
                if self._sent(plan):
                    break
                # The chain has forgotten this producer. What it knew is in the WAL; send the rest in a new epoch.
                ticks |= self._in_wal(plan.since)
                plan = _Plan(plan.since, plan.epoch + 1, self._missing())
                self._keep(plan)
            else:
                raise DeadlineExceeded(
                    f"{self._vchannel}: the chain keeps forgetting this import's producer: run the import again"
                )
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
        """Open a new term if the current one runs a chain version that does not know Imports."""
        if self._client.connection.describe(self._pchannel)["chain_version"] < MIN_CHAIN_VERSION[MessageType.IMPORT]:
            self._client.catalog.open_term(self._pchannel)

    def _in_wal(self, since: int) -> dict[int, int]:
        """Return the ticks of this import's messages in the WAL after `since`, by slice number."""
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
        """Append all missing slices. Return False if the chain has forgotten the producer."""
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
        """Return the tick of a slice whose result the chain no longer keeps. Waits until the WAL has it."""
        end = Deadline.after(self._client.settings.read_deadline)
        while True:
            found = self._in_wal(since)
            if number in found:
                return found[number]
            if not end.pause(0.05):
                raise DeadlineExceeded(
                    f"slice {number} is appended, but the WAL does not have it yet: start the streaming node and run "
                    "the import again"
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
        """Append one entry, again after each term change, until its messages are judged in the open term."""
        for _ in range(MAX_TERM_CHANGES):
            term = self._client.catalog.term(self._pchannel)
            judged = list(
                self._retried(encode_entry([replace(message, term=term) for message in group])).message_outcomes()
            )
            if not {each.reason for each in judged if isinstance(each, AppendRejected)} & _TERM:
                return judged
        raise DeadlineExceeded(
            f"{self._pchannel} changed its term {MAX_TERM_CHANGES} times in a row: run the import again"
        )

    def _retried(self, entry: bytes) -> AppendOutcome:
        """Append the same bytes, again if the answer is lost. The sequences in them make the retry safe.

        Raises TablesMoved if the staged files were left behind by a move of the tables.
        """
        settings = self._client.settings
        settings.check_place()
        attempts, pause = settings.append_attempts, settings.append_retry_delay
        return deliver_single(
            lambda _: self._client.connection.append(self._pchannel, [entry], deadline=settings.append_deadline),
            deadline=Deadline.after(attempts * (settings.append_deadline + pause)),
            attempts=attempts,
            pause=pause,
            numbered=True,
        )


def _entries(messages: list[tuple[int, MutableMessage]]) -> list[list[tuple[int, MutableMessage]]]:
    """Group messages by the size of an entry, at least one message per group."""
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
    """Return a positive number below 2**62 derived from `parts`."""
    digest = hashlib.sha256("/".join(str(part) for part in ("producer", *parts)).encode()).digest()
    return (int.from_bytes(digest[:8]) >> 2) | 1
