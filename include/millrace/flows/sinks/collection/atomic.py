"""A batch's messages as transactions: a batch's changes to one VChannel take effect at one tick.

If a source marks a batch as whole transactions (``Batch.atomic``), readers see them as a whole. One message takes
effect at one tick by itself. Several messages of a VChannel are wrapped in a transaction of the log, whose Commit is
sent only when the log has all of its bodies.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from millrace.client.produce.upsert import LEASE_MS, TXN_BYTES
from millrace.message import builders
from millrace.message.model import MutableMessage
from millrace.message.types import DML, MessageType

_FRAME: Final = frozenset({MessageType.BEGIN_TXN, MessageType.COMMIT_TXN})


def in_transactions(messages: Sequence[MutableMessage]) -> list[MutableMessage]:
    """Return `messages` with a transaction around the rows and deletes of each VChannel that has several.

    Those of more than TXN_BYTES are not wrapped, and other messages stay before them.
    """
    before = [each for each in messages if each.type not in DML]
    by_vchannel: dict[str, list[MutableMessage]] = {}
    for each in messages:
        if each.type in DML:
            by_vchannel.setdefault(each.vchannel, []).append(each)
    found = before
    for mine in by_vchannel.values():
        fits = len(mine) > 1 and sum(len(each.payload) for each in mine) <= TXN_BYTES
        found += _framed(mine) if fits else mine
    return found


def transaction_of(message: MutableMessage) -> int:
    """Return the transaction that a message is a part of, or 0. The end of an abandoned transaction counts as none."""
    return 0 if message.type == MessageType.ROLLBACK_TXN else message.txn_id


def is_commit(message: MutableMessage) -> bool:
    return message.type == MessageType.COMMIT_TXN


def begun_again(messages: Iterable[MutableMessage], *, split: bool = False) -> list[MutableMessage]:
    """Return `messages` in new transactions, with rollbacks of their old ones; with `split`, in none."""
    found: list[MutableMessage] = []
    by_id: dict[int, list[MutableMessage]] = {}
    for each in messages:
        if transaction_of(each):
            by_id.setdefault(each.txn_id, []).append(each)
        elif each.type != MessageType.ROLLBACK_TXN:
            found.append(each)
    for txn_id, mine in by_id.items():
        found.append(_ended(txn_id, mine[0]))
        bodies = [replace(each, txn_id=0) for each in mine if each.type not in _FRAME]
        found += _framed(bodies) if len(bodies) > 1 and not split else bodies
    return found


def _framed(messages: Sequence[MutableMessage]) -> list[MutableMessage]:
    txn_id, vchannel, number = secrets.randbits(62) + 1, messages[0].vchannel, messages[0].collection_id
    begin = builders.begin_txn(txn_id, vchannel=vchannel, collection_id=number, term=0, keepalive_ms=LEASE_MS)
    commit = builders.commit_txn(txn_id, vchannel=vchannel, collection_id=number, term=0)
    return [begin, *(replace(each, txn_id=txn_id) for each in messages), commit]


def _ended(txn_id: int, member: MutableMessage) -> MutableMessage:
    return builders.rollback_txn(txn_id, vchannel=member.vchannel, collection_id=member.collection_id, term=0)
