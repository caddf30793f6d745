"""Conditional appends: the events of a command take effect if their aggregate still has the expected version.

The condition is part of the log. On its VChannel an aggregate is an idempotent producer (docs/chain.md, "Producers"):
its id is a hash of the key, and a command opens the epoch ``expected version + 1`` with sequence 0. The chain accepts
an epoch once, and no lower one afterwards. So of several commands with one expected version the first in the log wins,
whichever process, host or server sent them, and the others change nothing. The chain judges this at each command's
place in the log; there is no gap between a read and a write.

The chain remembers a bounded number of producers for each VChannel (``max_producers``). A command says by its barrier
tick up to where its sender has read the aggregate. If the chain has forgotten aggregates that changed after that tick,
it refuses the command, and the sender reads again. So a version must have been read, at the barrier tick, before it is
expected: :class:`Condition` says so.

An event message is an Insert with all events of its command, which become visible at one tick.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, DeadlineExceeded
from millrace.client.database import Database
from millrace.client.produce.lane import deliver_single
from millrace.message.ids import COORDINATOR_ID, pchannel_of
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.rpc.outcome import parse_duplicate
from millrace.wal.reasons import Reason

MAX_VERSION: Final = (1 << 31) - 1
"""The greatest version of an aggregate: an epoch is an int32."""
MAX_REFUSED: Final = 256
"""Refused commands with one expected version, after which no more are tried: each uses one sequence of the epoch."""
_TERMS: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED})
_TERM_ATTEMPTS: Final = 8


class Answer(Enum):
    """What the chain said of a command."""

    APPENDED = auto()
    TAKEN = auto()
    """Another command, or an earlier attempt of this one, has appended that version."""
    UNREAD = auto()
    """The aggregate may have changed after the condition's tick: read it again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a command, and a tick up to which the PChannel was decided when it was given."""

    answer: Answer
    tick: int


@dataclass(frozen=True, slots=True)
class Condition:
    """The aggregate `key` has exactly `version`, as read at `tick`."""

    key: str
    version: int
    tick: int


def stream_id(key: str) -> int:
    """Return the producer id of an aggregate: 62 bits of a BLAKE2b hash of its key, never 0."""
    found = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2
    return found if found not in (0, COORDINATOR_ID) else 1


def conditional(message: MutableMessage, condition: Condition) -> MutableMessage:
    """Return an Insert or Upsert of events of one aggregate, to take effect if `condition` holds."""
    return replace(
        message,
        producer_id=stream_id(condition.key),
        epoch=condition.version + 1,
        sequence=0,
        barrier_tick=condition.tick,
    )


class ConditionalSender:
    """Sends conditional messages. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._terms: dict[str, int] = {}

    def send(self, messages: Sequence[MutableMessage]) -> list[Verdict | AppendRejected | DeadlineExceeded]:
        """Append messages of one PChannel, each of another aggregate, and return the verdict about each, in order.

        An append whose answer was lost is repeated with the same numbers. Raises LogUnavailable or DeadlineExceeded if
        none comes: each message is then in the log once or not at all. Returns DeadlineExceeded about a message that
        the chain still wants with other numbers after the setting `append_deadline`: it is not in the log.
        """
        found: list[Verdict | AppendRejected | DeadlineExceeded | None] = [None] * len(messages)
        waiting = dict(enumerate(messages))
        seconds = self._database.settings.append_deadline
        end = Deadline.after(seconds)
        attempts = terms = 0
        while waiting:
            attempts += 1
            places = list(waiting)
            rows = self._sent([waiting[place] for place in places])
            stale = False
            for place, row in zip(places, rows, strict=True):
                if row["reason"] in _TERMS and terms < _TERM_ATTEMPTS:
                    stale = True
                    continue
                judged = _judged(row)
                if judged is None:  # the sequence was used up by a command that was refused
                    following = waiting[place].sequence + 1
                    if following < MAX_REFUSED:
                        waiting[place] = replace(waiting[place], sequence=following)
                        continue
                    judged = AppendRejected(
                        f"{following} commands with this expected version were refused: {row['detail']}",
                        reason=str(row["reason"]),
                    )
                if isinstance(judged, Verdict) and judged.answer is Answer.UNREAD and waiting[place].sequence:
                    # The chain forgot the aggregate between two attempts: the epoch begins anew.
                    waiting[place] = replace(waiting[place], sequence=0)
                    continue
                found[place] = judged
                del waiting[place]
            if stale:
                terms += 1
                self._terms.pop(pchannel_of(messages[0].vchannel), None)
            if end.expired():
                for place, row in zip(places, rows, strict=True):
                    if place in waiting:
                        found[place] = DeadlineExceeded(
                            f"the chain refused these events {attempts} times in {seconds:g} s, at last with"
                            f" {row['reason']} ({row['detail']}): nothing was appended; repeat the command"
                        )
                break
        return [each for each in found if each is not None]

    def _sent(self, messages: Sequence[MutableMessage]) -> list[dict[str, object]]:
        settings, pchannel = self._database.settings, pchannel_of(messages[0].vchannel)
        term = self._terms.get(pchannel)
        if term is None:
            term = self._terms[pchannel] = self._database.catalog.term(pchannel)
        entry = encode_entry([replace(each, term=term) for each in messages])
        outcome = deliver_single(
            lambda deadline: self._database.connection.append(pchannel, [entry], deadline=deadline.remaining()),
            deadline=Deadline.after(settings.append_deadline),
            attempts=settings.append_attempts,
            pause=settings.append_retry_delay,
            numbered=True,
        )
        found: list[dict[str, object]] = outcome.rows.select(["reason", "detail", "time_tick"]).to_pylist()
        return found


def _judged(row: dict[str, object]) -> Verdict | AppendRejected | None:
    """Return the verdict of one row of an outcome; None if the message is to be sent with the next sequence."""
    reason, detail, tick = str(row["reason"]), str(row["detail"]), int(str(row["time_tick"]))
    if not reason:
        return Verdict(Answer.APPENDED, tick)
    if reason == Reason.DUPLICATE:
        _, first, refused = parse_duplicate(detail)
        return None if refused else Verdict(Answer.TAKEN, max(tick, first))
    if reason == Reason.ALREADY_APPLIED:
        return None
    if reason == Reason.PRODUCER_FENCED:
        return Verdict(Answer.TAKEN, tick)
    if reason == Reason.UNKNOWN_PRODUCER:
        return Verdict(Answer.UNREAD, tick)
    return AppendRejected(f"the events were rejected: {reason} ({detail})", reason=reason)
