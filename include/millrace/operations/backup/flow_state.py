"""What flows keep besides their tables: into a backup, and out of it into an empty deployment.

    flow-documents/<flow>/…       pauses, records to skip, ranges in which workers ended
    flow-lanes/<flow>/<lane>/…    the newest journal of each lane into a collection
    captures/<group>/spool.db     the spool of a capture, whole
    streams/<name>/…              a Spark stream's checkpoint and its sink's memory, with `state.json`

The order makes these fit the tables and the log of the same backup:

1. Documents, before any position: a record that is skipped after a position stays skipped.
2. Trims of spools stop. Then the positions are pinned (table_pins.py).
3. The flows are held (millrace.flows.hold). Then come the journals, the checkpoints, the tables of flows, and the end
   of the log. So the log has what the journals name, and nothing that comes after it.
4. Spools: they have all changes after every position.

A checkpoint's state files do not change once they are named, and Spark keeps those of a hundred micro-batches, so they
are copied after the hold.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from millrace.base.errors import MetaAmbiguous, UnsupportedVersion
from millrace.base.scratch_folder import ScratchFolder
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.store_factory import open_cluster_store
from millrace.flows.hold import flows_held, spools_held
from millrace.flows.range_host.documents import PREFIX, all_documents, document_key
from millrace.flows.range_host.status import flow_folder
from millrace.flows.sinks.collection.lane import LANES
from millrace.flows.sources.capture.shared_spool import FOLDER as SPOOLS
from millrace.flows.sources.capture.shared_spool import SharedSpool, shared_groups, shared_spool
from millrace.flows.sources.capture.spool import FILE, Spool, copy_shared_spool, release_copy
from millrace.flows.sources.capture.ticks import CAPTURES
from millrace.flows.spark_host.incarnations import FOLDER as MEMORY
from millrace.flows.spark_host.incarnations import (
    LOCK,
    STATE,
    STREAMS,
    Incarnations,
    State,
    is_checksum,
    newest_batch,
    state_key,
    stored_streams,
)
from millrace.meta.store import Delete, MetaStore, Put
from millrace.operations.backup.files import BackupFiles, FileGone
from millrace.operations.backup.log_copy import copy_database
from millrace.storage.store import TableStore, list_below, store_at

DOCUMENTS: Final = "flow-documents"
_LANE_TRIES: Final = 20
_THREADS: Final = 8
_STAGED: Final = "staged"
_RETAINED: Final = 50
"""Micro-batches that a stream may take while its state is copied: half of those whose state Spark keeps."""
_AGAIN: Final = ("kafka-stream.json", "opensearch.json")
"""Notes by which readers or an index tell the incarnations of a query apart."""


def take_documents(settings: Settings, files: BackupFiles) -> None:
    """Copy the documents of flows. Raises MetaUnavailable."""
    for flow, documents in all_documents(settings).items():
        for name, body in documents.items():
            _write(files, f"{DOCUMENTS}/{flow}/{name}", body)


def _write(files: BackupFiles, name: str, body: bytes) -> None:
    files.prepare_path(name).write_bytes(body)
    files.add_written(name)


# --- spools ----------------------------------------------------------------------------------------------------------


@contextmanager
def held_spools(settings: Settings) -> Iterator[None]:
    """Keep the spools of captures whole inside. Raises BackupBusy."""
    with ExitStack() as stack:
        stack.enter_context(spools_held(settings))
        for folder in _local_spools(settings):
            with Spool(folder) as spool:
                spool.hold()
            stack.callback(_let_go, folder)
        yield


def _let_go(folder: Path) -> None:
    with suppress(OSError), Spool(folder) as spool:  # it ends by itself
        spool.hold(seconds=0)


def _local_spools(settings: Settings) -> list[Path]:
    return sorted(path.parent for path in (settings.data_dir / CAPTURES).glob(f"*/{FILE}"))


def take_spools(settings: Settings, files: BackupFiles) -> None:
    """Copy the spools: the shared ones, and those that this machine alone has.

    Raises MetaUnavailable, CaptureLost.
    """
    shared = shared_groups(settings)
    for group in shared:
        found = shared_spool(settings, group)
        assert found is not None, "there is a meta store"
        scratch = ScratchFolder(settings.run_path / "backups" / uuid.uuid4().hex, pattern="[0-9a-f]{32}")
        try:
            with closing(found):
                copy_shared_spool(found, scratch.path)
            copy_database(scratch.path / FILE, f"{CAPTURES}/{group}/{FILE}", files, changed=release_copy)
        finally:
            scratch.discard()
    for folder in _local_spools(settings):
        if folder.name not in shared:
            copy_database(folder / FILE, f"{CAPTURES}/{folder.name}/{FILE}", files, changed=release_copy)


# --- journals and checkpoints ----------------------------------------------------------------------------------------


@dataclass
class HeldFlows:
    """Where flows stand at the end of the log."""

    settings: Settings
    files: BackupFiles
    _later: list[_StateFiles] = field(default_factory=list)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Copy where the flows stand, and hold them inside: the log's end is read there.

        Raises BackupBusy, FileGone.
        """
        with flows_held(self.settings):
            self._take_lanes()
            for name in stored_streams(self.settings):
                self._take_stream(name)
            yield

    def take_rest(self) -> None:
        """Copy the state files of checkpoints, which need no hold. Raises FileGone."""
        for each in self._later:
            each.take(self.files)

    def _take_lanes(self) -> None:
        """Copy the newest file of each lane's journal."""
        root = store_at(self.settings.table_uri(LANES))
        lanes = []
        for flow in root.folders():
            store = store_at(self.settings.table_uri(f"{LANES}/{flow}"))
            lanes += [(store, flow, lane) for lane in store.folders()]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="backup") as pool:
            list(pool.map(lambda each: self._take_lane(*each), lanes))

    def _take_lane(self, store: TableStore, flow: str, lane: str) -> None:
        for _ in range(_LANE_TRIES):
            names = store.list(lane)
            try:
                if names:
                    self.files.copy_table_file(store, f"{lane}/{max(names)}", f"{LANES}/{flow}")
                return
            except FileGone:
                continue  # a newer one has replaced it
        raise FileGone(f"the journal of lane {lane} of the flow {flow} is always replaced: try again")

    def _take_stream(self, name: str) -> None:
        """Copy a checkpoint: the sink's memory before Spark's commits, and those before what they name."""
        incarnations = Incarnations(self.settings, name)
        state = incarnations.state
        here, number = store_at(incarnations.folder), str(state.incarnation)
        names = [each for each in list_below(here) if not is_checksum(each)]
        mine, beside = [], []
        for each in names:
            first, _, rest = each.partition("/")
            if rest and first.isdecimal():
                mine += [rest] if first == number else []
            elif first not in (LOCK, STATE, _STAGED):
                beside.append(each)
        if not mine and not state.fingerprint and not state.paused:
            return
        prefix = f"{STREAMS}/{name}"
        checkpoint = store_at(incarnations.checkpoint(state))
        memory = [each for each in mine if each.startswith(f"{MEMORY}/") and f"/{_STAGED}/" not in each]
        # Data files of an operator's table never change.
        later = [each for each in memory if each.endswith(".parquet") and "/_delta_log/" not in each]
        self._copy(checkpoint, f"{prefix}/{number}", (each for each in memory if each not in later))
        newest = newest_batch(incarnations.checkpoint(state))
        logs = [f"{log}/{batch}" for log in ("commits", "offsets") for batch in (newest - 1, newest) if batch >= 0]
        following = f"offsets/{newest + 1}"
        there = {each: checkpoint.size(each) for each in [*logs, following]}
        self._copy(checkpoint, f"{prefix}/{number}", (each for each in logs if there[each] is not None))
        if there[following] is not None:
            self._copy(checkpoint, f"{prefix}/{number}", [following])
        other = [each for each in mine if each.partition("/")[0] not in ("commits", "offsets", "state", MEMORY)]
        self._copy(checkpoint, f"{prefix}/{number}", other)
        self._copy(here, prefix, beside)
        _write(self.files, f"{prefix}/{STATE}", json.dumps(replace(state, place="").encode()).encode())
        # Listed after the commits, so that it has what they need.
        states = [each for each in list_below(checkpoint, "state") if not is_checksum(each)]
        self._later.append(_StateFiles(incarnations, state, checkpoint, f"{prefix}/{number}", newest, states, later))

    def _copy(self, store: TableStore, prefix: str, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="backup") as pool:
            list(pool.map(lambda each: self.files.copy_table_file(store, each, prefix), names))


@dataclass(frozen=True, slots=True)
class _StateFiles:
    """Files of a checkpoint that are copied after the hold."""

    incarnations: Incarnations
    state: State
    checkpoint: TableStore
    prefix: str
    newest: int
    states: list[str]
    tables: list[str]

    def take(self, files: BackupFiles) -> None:
        def one(name: str) -> None:
            with suppress(FileGone):  # of a version that Spark needs no more, or the stream went on for too long
                files.copy_table_file(self.checkpoint, name, self.prefix)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="backup") as pool:
            list(pool.map(one, self.states))
        for name in self.tables:
            files.copy_table_file(self.checkpoint, name, self.prefix)
        now = self.incarnations.state
        if now.incarnation != self.state.incarnation or now.place != self.state.place:
            raise FileGone(f"the stream {self.incarnations.name} was replayed during the backup: try again")
        if newest_batch(self.incarnations.checkpoint(now)) - self.newest > _RETAINED:
            raise FileGone(
                f"the stream {self.incarnations.name} took more than {_RETAINED} micro-batches while its state was"
                " copied: try again"
            )


# --- restore ---------------------------------------------------------------------------------------------------------


def restored_name(settings: Settings, name: str) -> str:
    """Return where a file of a backup goes in a data folder. Documents go to the flow's folder."""
    first, _, rest = name.partition("/")
    if first != DOCUMENTS:
        return name
    flow, _, document = rest.partition("/")
    return str((flow_folder(settings, flow) / document).relative_to(settings.data_dir))


def is_of_tables(settings: Settings, name: str) -> bool:
    """Return whether a flow's file goes to the place of the tables: checkpoints, if that is an object store."""
    first, _, rest = name.partition("/")
    return first == STREAMS and isinstance(Incarnations(settings, rest.partition("/")[0]).home, str)


def bring_back(settings: Settings, drafted: Settings, names: Iterable[str]) -> tuple[str, ...]:
    """Make what was copied into the data folder of `drafted` that of the deployment of `settings`; return notes.

    With a meta store, whose keys of flows are of a restore that was killed, the documents, states and spools go there.
    Raises MetaUnavailable, MetaAmbiguous.
    """
    names = list(names)
    notes = [*_begin_again(settings, drafted, names), *_notes_on_spools(names)]
    if settings.meta_store:
        with open_cluster_store(settings, SystemClock()) as store:
            for prefix in (PREFIX, f"{STREAMS}/", f"{SPOOLS}/"):
                _put(store, [Delete(each.key) for each in store.list(prefix).entries])
            _share_documents(store, drafted, names)
            _share_states(store, settings, drafted, names)
            _share_spools(settings, drafted, names)
    else:
        _place_states(settings, drafted, names)
    return tuple(notes)


def _put(store: MetaStore, changes: list[Put] | list[Delete]) -> None:
    for each in changes:
        with suppress(MetaAmbiguous):  # once more is the same
            store.commit([each])
            continue
        store.commit([each])


def _share_documents(store: MetaStore, drafted: Settings, names: list[str]) -> None:
    for name in names:
        if name.startswith(f"{DOCUMENTS}/"):
            flow, _, document = name.removeprefix(f"{DOCUMENTS}/").partition("/")
            path = flow_folder(drafted, flow) / document
            _put(store, [Put(document_key(flow, document), path.read_bytes())])
            path.unlink()


def _states(settings: Settings, drafted: Settings, names: list[str]) -> Iterator[tuple[str, TableStore, State]]:
    """Yield each stream's name, the folder that has its files, and its state, as the settings say where it lies."""
    for name in names:
        first, _, rest = name.partition("/")
        stream, _, file = rest.partition("/")
        if first == STREAMS and file == STATE:
            home = Incarnations(settings, stream).home
            here = store_at(home if isinstance(home, str) else drafted.data_dir / STREAMS / stream)
            state = State.decode(json.loads(here.read(STATE) or b"{}"), stream)
            yield stream, here, replace(state, place=home if isinstance(home, str) else "")


def _share_states(store: MetaStore, settings: Settings, drafted: Settings, names: list[str]) -> None:
    for stream, here, state in _states(settings, drafted, names):
        _put(store, [Put(state_key(stream), json.dumps(state.encode()).encode())])
        here.delete([STATE])


def _place_states(settings: Settings, drafted: Settings, names: list[str]) -> None:
    """Without a meta store a state is a file of the data folder, wherever its checkpoint lies."""
    for stream, here, state in _states(settings, drafted, names):
        here.delete([STATE])
        folder = store_at(drafted.data_dir / STREAMS / stream)
        folder.replace(STATE, json.dumps(state.encode()).encode())


def _share_spools(settings: Settings, drafted: Settings, names: list[str]) -> None:
    for group in _groups(names):
        shared = SharedSpool(
            open_cluster_store(settings, SystemClock()),
            store_at(drafted.table_uri(f"{SPOOLS}/{group}")),
            group,
            place=settings.tables_uri,
        )
        Spool(drafted.data_dir / CAPTURES / group, write=True, shared=shared).close()


def _groups(names: list[str]) -> list[str]:
    return [name.split("/")[1] for name in names if name.startswith(f"{CAPTURES}/") and name.endswith(f"/{FILE}")]


def _notes_on_spools(names: list[str]) -> list[str]:
    return [
        f"{group}: goes on at the position in its database that the backup has; if the database has removed what comes"
        " after it, the capture stops with CAPTURE_LOST and needs a new snapshot"
        for group in _groups(names)
    ]


def _begin_again(settings: Settings, drafted: Settings, names: list[str]) -> Iterator[str]:
    """Give sinks outside of the deployment another identity, since those went on; yield notes."""
    for name in names:
        first, _, rest = name.partition("/")
        stream, _, file = rest.partition("/")
        if first != STREAMS or (last := file.rpartition("/")[2]) not in _AGAIN:
            continue
        home = Incarnations(settings, stream).home
        store = store_at(home if isinstance(home, str) else drafted.data_dir / STREAMS / stream)
        found: Mapping[str, object] = json.loads(store.read(file) or b"{}")
        again: Mapping[str, object]
        if last == "opensearch.json":
            if "begun" not in found:
                raise UnsupportedVersion(f"{name} of the backup has no beginning: restore it with a newer build")
            again = {**found, "begun": max(int(time.time()), int(str(found["begun"])) + 1)}
            words = "documents of the time after the backup are written again"
        else:
            again = {**found, "name": secrets.token_hex(16)}
            words = "messages of the time after the backup are sent again, as those of another stream"
        store.replace(file, f"{json.dumps(again)}\n".encode())
        yield f"{stream}: its sink is not in the backup and may have gone on: {words}"
