"""Views of WAL rows: message rows, a message with its payload, open and ended transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.catalog.collection import CollectionInfo
from millrace.message.ids import tick_physical_ms
from millrace.message.tombstones import describe_value
from millrace.message.types import MessageType
from millrace.observe.models import MessageRow, MessageView, TransactionRow
from millrace.observe.payloads import payload_view
from millrace.observe.wal_search import WalQuery
from millrace.tables.wal.table import WalPosition
from millrace.wal.schema import RowKind

TXN_END_TYPES = (MessageType.COMMIT_TXN.name, MessageType.ROLLBACK_TXN.name)
"""Messages that end a transaction."""


def message_row(row: Mapping[str, Any], kind: RowKind, names: Mapping[int, str]) -> MessageRow:
    """Return a row of the WAL without its payload."""
    return MessageRow(**_fields(row, kind, names))


def _fields(row: Mapping[str, Any], kind: RowKind, names: Mapping[int, str]) -> dict[str, Any]:
    return {
        "id": f"{row['ledger']}:{row['entry']}:{row['index']}:{row['ordinal']}",
        "pchannel": row["pchannel"],
        "kind": kind,
        "type": row["type"],
        "vchannel": row["vchannel"],
        "time_tick": row["time_tick"],
        "time": row["physical_ms"] / 1000,
        "term": row["term"],
        "collection_id": row["collection_id"],
        "collection": names.get(row["collection_id"]),
        "partition_id": row["partition_id"],
        "segment_id": row["segment_id"],
        "schema_version": row["schema_version"],
        "rows": row["rows"],
        "txn_id": row["txn_id"],
        "producer_id": row["producer_id"],
        "epoch": row["epoch"],
        "sequence": row["sequence"],
        "last_confirmed": f"{row['lc_ledger']}:{row['lc_entry']}:{row['lc_index']}:{row['lc_ordinal']}",
        "reason": row["reason"],
        "detail": row["detail"],
        "principal": row.get("principal"),
    }


def message_view(row: Mapping[str, Any], kind: RowKind, collection: CollectionInfo | None) -> MessageView:
    """Return a row of the WAL with its decoded payload. `collection` is the row's; None if the catalog has none."""
    data: bytes = row["payload"] or b""
    shown, cut = payload_view(
        row["type"], () if collection is None else collection.schemas, row["schema_version"], data
    )
    names = {} if collection is None else {collection.id: collection.name}
    fields = _fields(row, kind, names)
    fields["detail"] = describe_value(data) or fields["detail"]
    return MessageView(**fields, payload_bytes=len(data), payload=shown, payload_cut=cut)


def ended_transaction(row: Mapping[str, Any], names: Mapping[int, str]) -> TransactionRow:
    """Return a transaction, given the message that ended it."""
    return TransactionRow(
        txn_id=row["txn_id"],
        pchannel=row["pchannel"],
        vchannel=row["vchannel"],
        collection=names.get(row["collection_id"]),
        state="committed" if row["type"] == MessageType.COMMIT_TXN.name else "rolled back",
        begin=None,
        ended=row["physical_ms"] / 1000,
        end_id=f"{row['ledger']}:{row['entry']}:{row['index']}:{row['ordinal']}",
        end_tick=row["time_tick"],
        detail=row["detail"],
    )


def open_transactions(
    positions: Mapping[str, WalPosition], query: WalQuery, names: Mapping[int, str]
) -> list[TransactionRow]:
    """Return the open transactions of the channel states that match `query`."""
    found = []
    for pchannel, position in sorted(positions.items()):
        state = position.state
        if state is None or (query.pchannel and query.pchannel != pchannel):
            continue
        for channel, txn in state.open_txns():
            if query.vchannel not in ("", channel.name) or query.txn_id not in (None, txn.id):
                continue
            if query.collection_id not in (None, channel.collection_id):
                continue
            found.append(
                TransactionRow(
                    txn_id=str(txn.id),
                    pchannel=pchannel,
                    vchannel=channel.name,
                    collection=names.get(channel.collection_id, channel.collection_name),
                    state="open",
                    begin=tick_physical_ms(txn.begin_tick) / 1000,
                    ended=None,
                    end_id=str(txn.begin),
                    bytes=txn.bytes,
                    expires=tick_physical_ms(txn.deadline(state.config)) / 1000,
                )
            )
    return found
