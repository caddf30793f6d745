"""Shard: collections, partitions, schemas and segments. Judges rows and DDL. Innermost interceptor. docs/chain.md,
"Types".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.bodies import ImportBody, import_partitions, parse_body
from millrace.message.keys import key_column, vchannel_index
from millrace.message.payload.rows import DecodedRows, decode_many
from millrace.message.schema import CollectionSchema
from millrace.message.schema_changes import SchemaChange, apply_changes
from millrace.message.types import DML, ROW_CARRYING_TYPES, MessageType
from millrace.wal.interceptors.interceptor import Proceed, Timer
from millrace.wal.interceptors.shard import segments
from millrace.wal.interceptors.txn.interceptor import TxnManager
from millrace.wal.message_run import ACCEPTED, DecidedBatch, DecidedMessage, Emission, MessageRun, group_indices
from millrace.wal.open_work import SEGMENTS
from millrace.wal.reasons import Reason
from millrace.wal.segments import MESSAGE_POLICIES, Segment, time_policy
from millrace.wal.shared_map import SharedMap
from millrace.wal.state import ChannelState, VChannelState

_DDL: Final = frozenset(
    {
        MessageType.CREATE_COLLECTION,
        MessageType.DROP_COLLECTION,
        MessageType.CREATE_PARTITION,
        MessageType.DROP_PARTITION,
        MessageType.SCHEMA_CHANGE,
        MessageType.MANUAL_FLUSH,
        MessageType.FLUSH_ALL,
        MessageType.IMPORT,
    }
)


class _Refused(Exception):
    """The rejection of a DDL message, raised by the rule that found it."""

    def __init__(self, reason: Reason, words: str) -> None:
        super().__init__(words)
        self.reason = reason


class ShardInterceptor:
    """The collections of one PChannel."""

    name = "shard"

    def __init__(self, txns: TxnManager) -> None:
        self._txns = txns

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        number = int(run.columns.type[run.start])
        if number in DML:
            self._judge_rows(state, run)
            segments.cut_after_seal(state, run)
        elif run.first_accepted and number in _DDL:
            try:
                self._judge_ddl(state, run)
            except Malformed as error:
                run.reject(0, Reason.MALFORMED, str(error))
            except InvalidArgument as error:
                run.reject(0, Reason.MALFORMED, str(error))
            except _Refused as refusal:
                run.reject(0, refusal.reason, str(refusal))
        proceed(run)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _judge_rows(self, state: ChannelState, run: MessageRun) -> None:
        columns = run.columns
        for rows in self._groups(run, columns.vchannel, columns.collection_id):
            channel = state.vchannels.get(columns.vchannel_name(run.start + int(rows[0])))
            collection_id = int(columns.collection_id[run.start + rows[0]])
            if channel is None or channel.collection_id != collection_id:
                name = columns.vchannel_name(run.start + int(rows[0]))
                run.reject(rows, Reason.COLLECTION_NOT_FOUND, f"no collection {collection_id} on VChannel {name!r}")
        for rows in self._groups(run, columns.vchannel, columns.partition_id, columns.type):
            row = run.start + int(rows[0])
            partition_id = int(columns.partition_id[row])
            known = state.vchannels[columns.vchannel_name(row)].partitions
            if partition_id not in known and not (partition_id == 0 and columns.type[row] == MessageType.DELETE):
                run.reject(rows, Reason.PARTITION_NOT_FOUND, f"the collection has no partition {partition_id}")
        for rows in self._groups(run, columns.vchannel, columns.schema_version):
            row = run.start + int(rows[0])
            version = int(columns.schema_version[row])
            newest = len(state.vchannels[columns.vchannel_name(row)].schemas)
            if not 1 <= version <= newest:
                run.reject(
                    rows, Reason.SCHEMA_MISMATCH, f"schema version {version} is not known; the newest is {newest}"
                )
        self._txns.judge_bodies(state, run)
        pending = run.pending()
        if len(pending):
            shapes = self._shapes(state, run, pending)
            others = (run.view(key)[pending] for key in (columns.schema_version, columns.type))
            for places in group_indices(shapes, *others):
                self._judge_payloads(state, run, pending[places])

    def _shapes(self, state: ChannelState, run: MessageRun, pending: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return a number per pending message, equal for VChannels that validate payloads identically."""
        # Only names in the run count: a batch may have many more, and many runs.
        codes, inverse = np.unique(run.view(run.columns.vchannel)[pending], return_inverse=True)
        shapes: dict[object, int] = {}
        names = (run.columns.names[code] for code in codes.tolist())
        numbers = [shapes.setdefault(_shape(state.vchannels.get(name)), len(shapes)) for name in names]
        return np.array(numbers, dtype=np.int64)[inverse]

    def _groups(self, run: MessageRun, *keys: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.intp]]:
        pending = run.pending()
        if len(pending):
            for places in group_indices(*(run.view(key)[pending] for key in keys)):
                yield pending[places]

    def _judge_payloads(self, state: ChannelState, run: MessageRun, rows: npt.NDArray[np.intp]) -> None:
        columns = run.columns
        row = run.start + int(rows[0])
        channel = state.vchannels[columns.vchannel_name(row)]
        schema = channel.schemas[int(columns.schema_version[row]) - 1]
        arrow = schema.arrow() if columns.type[row] in ROW_CARRYING_TYPES else schema.key_arrow()
        newest = channel.schemas[-1]
        judged = newest.has_row_rules and columns.type[row] in ROW_CARRYING_TYPES
        wanted = list(schema.key_names)
        if judged:
            from millrace.message.expression.rule_evaluation import rule_inputs

            wanted = list(dict.fromkeys([*wanted, *rule_inputs(schema, newest)]))
        decoded = decode_many(_select(columns.payloads, run.start + rows), arrow, columns=wanted)
        for place, words in decoded.errors.items():
            run.reject(int(rows[place]), Reason.SCHEMA_MISMATCH, words)
        claimed = run.view(columns.rows)[rows]
        for place in np.flatnonzero((decoded.counts != claimed) & (decoded.counts > 0)).tolist():
            words = f"the header says {claimed[place]} rows, the payload has {decoded.counts[place]}"
            run.reject(int(rows[place]), Reason.SCHEMA_MISMATCH, words)
        replaces = schema.replaces_duplicates and columns.type[row] == MessageType.INSERT
        judges = replaces or columns.type[row] == MessageType.UPSERT
        keys = key_column(decoded.rows, schema.key_names) if judges or len(channel.vchannels) > 1 else None
        if judges:
            self._judge_keys(run, rows, decoded.counts, keys)
        if len(channel.vchannels) > 1 and decoded.rows.num_rows:
            # All of them are VChannels of this collection on this PChannel (`_shape`), and in the state.
            codes, inverse = np.unique(run.view(columns.vchannel)[rows], return_inverse=True)
            number = np.array([state.vchannels[columns.names[code]].number for code in codes.tolist()])[inverse]
            homes = vchannel_index(keys, len(channel.vchannels))
            astray = homes != np.repeat(number, decoded.counts)
            if astray.any():
                owner = np.repeat(np.arange(len(rows)), decoded.counts)
                wrong = rows[np.unique(owner[astray])]
                wrong = wrong[run.reason[wrong] == 0]
                if len(wrong):
                    run.reject(
                        wrong, Reason.WRONG_VCHANNEL, "a primary key belongs to another VChannel of the collection"
                    )
        if judged:
            self._judge_rules(run, rows, decoded, schema, newest)
        if replaces:
            run.retype(rows[run.reason[rows] == ACCEPTED], MessageType.UPSERT)

    def _judge_rules(
        self,
        run: MessageRun,
        rows: npt.NDArray[np.intp],
        decoded: DecodedRows,
        schema: CollectionSchema,
        newest: CollectionSchema,
    ) -> None:
        """Reject messages with a row that violates a check or has a wrong value in a computed field."""
        from millrace.message.expression.rule_evaluation import find_violations

        owner = np.repeat(np.arange(len(rows)), decoded.counts)
        now = run.view(run.columns.physical_ms)[rows][owner] * 1_000
        first = np.cumsum(decoded.counts) - decoded.counts
        for rule in find_violations(decoded.rows, schema, newest, now):
            bad = np.flatnonzero(rule.rows)
            mine, places, counts = np.unique(owner[bad], return_index=True, return_counts=True)
            for message, place, count in zip(mine.tolist(), places.tolist(), counts.tolist(), strict=True):
                if run.reason[rows[message]] == ACCEPTED:
                    words = f"{rule.description} in {count} of its rows, the first is row {bad[place] - first[message]}"
                    run.reject(int(rows[message]), Reason.CHECK_VIOLATED, words)

    def _judge_keys(
        self, run: MessageRun, rows: npt.NDArray[np.intp], counts: npt.NDArray[Any], keys: pa.Array
    ) -> None:
        """Reject upserts with a duplicate key: neither of its rows is the newer one."""
        if (counts <= 1).all():
            return
        codes = keys.dictionary_encode()
        if len(codes.dictionary) == len(keys):
            return
        owner = np.repeat(np.arange(len(rows)), counts)
        pairs = owner * len(codes.dictionary) + codes.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(pairs, kind="stable")
        again = order[1:][np.diff(pairs[order]) == 0]
        twice = rows[np.unique(owner[again])]
        twice = twice[run.reason[twice] == 0]
        if len(twice):
            words = "the message has a key twice, and its rows have no order: send them in separate messages"
            run.reject(twice, Reason.DUPLICATE_KEY, words)

    # -- DDL ----------------------------------------------------------------------------------------------------------

    def _judge_ddl(self, state: ChannelState, run: MessageRun) -> None:
        """Judge one DDL message. Raises _Refused or Malformed."""
        columns, row = run.columns, run.start
        message_type = MessageType(int(columns.type[row]))
        body = parse_body(message_type, columns.payload(row))
        name = columns.vchannel_name(row)
        if message_type is MessageType.FLUSH_ALL:
            if name:
                raise Malformed("FlushAll goes to the whole PChannel: its VChannel is empty")
            return
        collection_id = int(columns.collection_id[row])
        if message_type is MessageType.CREATE_COLLECTION:
            self._create_collection(state, name, collection_id, body)
            return
        if message_type is MessageType.IMPORT:
            _check_import_header(run, body)
        channel = state.vchannels.get(name)
        if channel is None or channel.collection_id != collection_id:
            raise _Refused(Reason.COLLECTION_NOT_FOUND, f"no collection {collection_id} on VChannel {name!r}")
        partition_id = int(columns.partition_id[row])
        match message_type:
            case MessageType.CREATE_PARTITION:
                self._create_partition(state, channel, partition_id, body["name"])
            case MessageType.DROP_PARTITION if partition_id not in channel.partitions:
                raise _Refused(Reason.PARTITION_NOT_FOUND, f"the collection has no partition {partition_id}")
            case MessageType.SCHEMA_CHANGE:
                self._change_schema(channel, int(columns.schema_version[row]), body["changes"])
            case MessageType.IMPORT:
                self._import(channel, int(columns.schema_version[row]), body)
            case MessageType.MANUAL_FLUSH if not _ending(channel, partition_id, body.get("segment_id")):
                raise _Refused(Reason.NO_EFFECT, "nothing grows there: there is no segment to flush")

    def _create_collection(self, state: ChannelState, name: str, collection_id: int, body: dict[str, Any]) -> None:
        if collection_id <= 0:
            raise Malformed("a collection's id must be positive")
        stem, _, number = name.rpartition("v")
        if stem != f"{state.pchannel}_{collection_id}" or name not in body["vchannels"] or not number.isdigit():
            raise _Refused(
                Reason.VCHANNEL_NOT_FOUND,
                f"{name!r} is not a VChannel of collection {collection_id} on {state.pchannel}:"
                f" it must be {state.pchannel}_{collection_id}v<n> and be in the message's list",
            )
        if name in state.vchannels:
            raise _Refused(Reason.COLLECTION_EXISTS, f"VChannel {name!r} has a collection already")
        if len(state.vchannels) >= state.config.max_vchannels or len(body["partitions"]) > state.config.max_partitions:
            raise _Refused(Reason.LIMIT_EXCEEDED, "the PChannel takes no more VChannels or partitions")

    def _create_partition(self, state: ChannelState, channel: VChannelState, partition_id: int, name: str) -> None:
        if partition_id <= 0:
            raise Malformed("a partition's id must be positive")
        if partition_id in channel.partitions or name in channel.partitions.values():
            raise _Refused(
                Reason.PARTITION_EXISTS, f"partition {name!r} ({partition_id}) exists, or its name or id does"
            )
        if len(channel.partitions) >= state.config.max_partitions:
            raise _Refused(Reason.LIMIT_EXCEEDED, f"a collection has at most {state.config.max_partitions} partitions")

    def _change_schema(self, channel: VChannelState, version: int, changes: list[SchemaChange]) -> None:
        newest = len(channel.schemas)
        if version != newest + 1:
            raise _Refused(Reason.SCHEMA_MISMATCH, f"schema version {newest + 1} comes next, not {version}")
        try:
            apply_changes(channel.schemas[-1], changes)
        except InvalidArgument as error:
            raise _Refused(Reason.SCHEMA_MISMATCH, str(error)) from None

    def _import(self, channel: VChannelState, version: int, body: ImportBody) -> None:
        unknown = [number for number in import_partitions(body) if number not in channel.partitions]
        if unknown:
            raise _Refused(Reason.PARTITION_NOT_FOUND, f"the collection has no partition {unknown[0]}")
        newest = len(channel.schemas)
        if not 1 <= version <= newest:
            words = f"schema version {version} is not known; the newest is {newest}"
            raise _Refused(Reason.SCHEMA_MISMATCH, words)
        if channel.schemas[-1].has_row_rules and version != newest:
            words = f"an Import has the newest schema, {newest}, where rows are judged: stage its files by that one"
            raise _Refused(Reason.SCHEMA_MISMATCH, words)
        if channel.schemas[version - 1].replaces_duplicates and not body["replace"]:
            words = (
                "an Import puts rows beside those of their keys, and here a row replaces that of its key: insert them"
            )
            raise _Refused(Reason.SCHEMA_MISMATCH, words)

    # -- emissions and stamps
    # ------------------------------------------------------------------------------------------

    def emissions(self, state: ChannelState, run: MessageRun) -> list[Emission]:
        """Return flushes of the segments that the message ends, then the segments for its own rows.

        The ids of an Import's segments are ticks without a gap, so nothing may come between them.
        """
        if not run.first_accepted:
            return []
        columns, row = run.columns, run.start
        number = int(columns.type[row])
        if number in ROW_CARRYING_TYPES:
            channel, partition_id = state.vchannels[columns.vchannel_name(row)], int(columns.partition_id[row])
            return [] if partition_id in channel.growing else [segments.create_emission(channel, partition_id)]
        if number not in MESSAGE_POLICIES:
            return []
        body = parse_body(MessageType(number), columns.payload(row))
        name, partition_id = columns.vchannel_name(row), 0
        if number in (MessageType.DROP_PARTITION, MessageType.MANUAL_FLUSH):
            partition_id = int(columns.partition_id[row])
        found = [
            segments.flush_emission(channel, segment, MESSAGE_POLICIES[MessageType(number)])
            for channel in ([state.vchannels[name]] if name else state.channels_with(lambda work: work.growing > 0))
            for segment in _ending(channel, partition_id, body.get("segment_id"))
        ]
        if number == MessageType.IMPORT:
            found += [segments.create_emission(state.vchannels[name], number) for number in import_partitions(body)]
        return found

    def first_timer(self, state: ChannelState, tick: int) -> Timer | None:
        """Return the timer of the growing segment that is old or idle first, if it is due."""
        config, first = state.config, state.open_work.segment_timer
        if first[0] > tick:
            return None
        for channel in state.channels_with(lambda work: work.segment_timer == first):
            for _, segment in channel.growing.where(SEGMENTS, config, lambda work: work.segment_timer == first):
                return Timer(*first, segments.flush_emission(channel, segment, time_policy(segment, config, tick)))
        return None

    def stamp(self, state: ChannelState, run: MessageRun) -> None:
        run.segment = segments.assign_segments(state, run)

    def ready_emission(self, state: ChannelState) -> Emission | None:
        return segments.ready_flush(state)

    # -- state ---------------------------------------------------------------------------------------------------------

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        segments.evolve_rows(state, rows)

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        if row.type is MessageType.CREATE_COLLECTION:
            state.put(_created(row))
            return
        channel = state.vchannels.get(row.vchannel)
        if channel is None:
            return
        match row.type:
            case MessageType.INSERT:
                after = segments.count_insert(channel, state.config, row)
            case MessageType.UPSERT:
                after = segments.count_insert(channel, state.config, row)
                after = segments.count_deletes(after, state.config, row.rows)
            case MessageType.DELETE:
                after = segments.count_deletes(channel, state.config, row.rows)
            case MessageType.DROP_COLLECTION:
                state.vchannels = state.vchannels.without(row.vchannel)
                return
            case MessageType.CREATE_PARTITION:
                name = parse_body(row.type, row.payload)["name"]
                after = channel._replace(partitions=channel.partitions.set(row.partition_id, name))
            case MessageType.DROP_PARTITION:
                after = channel._replace(partitions=channel.partitions.without(row.partition_id))
            case MessageType.SCHEMA_CHANGE:
                changes = parse_body(row.type, row.payload)["changes"]
                after = channel._replace(schemas=(*channel.schemas, apply_changes(channel.schemas[-1], changes)))
            case MessageType.CREATE_SEGMENT:
                begun = Segment(row.segment_id, row.partition_id, 0, 0, row.tick, channel.delete_rows, frozenset(), "")
                after = channel._replace(growing=channel.growing.set(row.partition_id, begun))
            case MessageType.IMPORT:
                after = segments.count_import(channel, row)
            case MessageType.FLUSH if row.segment_id in channel.sealed:
                after = channel._replace(sealed=channel.sealed.without(row.segment_id))
            case MessageType.FLUSH:
                after = channel._replace(growing=channel.growing.without(row.partition_id))
            case MessageType.COMMIT_TXN | MessageType.ROLLBACK_TXN:
                after = segments.release_txn(channel, row.txn_id, state.config)
            case _:
                return
        state.put(after)


def _shape(channel: VChannelState | None) -> object:
    return channel and (channel.collection_id, channel.vchannels, channel.schemas)


def _created(row: DecidedMessage) -> VChannelState:
    body = parse_body(row.type, row.payload)
    vchannels: tuple[str, ...] = tuple(body["vchannels"])
    schema: CollectionSchema = body["schema"]
    return VChannelState(
        name=row.vchannel,
        collection_id=row.collection_id,
        collection_name=body["name"],
        number=vchannels.index(row.vchannel),
        vchannels=vchannels,
        schemas=(schema,),
        partitions=SharedMap((partition_id, name) for name, partition_id in body["partitions"].items()),
        mvcc=row.tick,
    )


def _check_import_header(run: MessageRun, body: ImportBody) -> None:
    columns, row = run.columns, run.start
    if columns.rows[row] != sum(each["rows"] for each in body["files"]):
        raise Malformed("an Import's rows are those of its files")
    if columns.partition_id[row] or columns.txn_id[row]:
        raise Malformed("an Import names its partitions in its body, and is in no transaction")


def _ending(channel: VChannelState, partition_id: int, segment_id: int | None) -> list[Segment]:
    """Return the growing segments of a partition (0: of all), or the one with an id, in the order of their ids."""
    return [
        segment
        for segment in sorted(channel.growing.values())
        if partition_id in (0, segment.partition_id) and segment_id in (None, segment.id)
    ]


def _select(payloads: pa.LargeBinaryArray, rows: npt.NDArray[np.intp]) -> pa.LargeBinaryArray:
    """Return the payloads of ascending `rows`: a view if they are contiguous."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return payloads.slice(first, len(rows))
    return payloads.take(pa.array(rows))
