"""Sending with a spool: to the log while it is reachable, otherwise into the spool, which is sent later.

- While a PChannel's spool is not empty, new appends are queued after it.
- Messages keep the producer, epoch and sequence that they had when they were spooled, so resending has no second
  effect, even after kill -9 of this process (law 8). Progress is recorded after each entry that was resent.
- If the chain no longer knows a spooled message's producer, the message and all that follow are sent as a new
  producer's, if it was certainly never sent (millrace.client.spool.producer_remap). Otherwise its outcome is unknown:
  it is recorded as rejected, and the rest continues.
- A rejected message is written to ``rejected.jsonl``, synced and with its payload, before it counts as settled, and is
  passed to `on_rejected`. A message whose result the chain no longer remembers (ALREADY_APPLIED, after a crash) is
  written there too: it took effect, and the WAL has the result.
- Transactions need answers and are not spooled: they raise LogUnavailable while the spool is in use.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import pyarrow as pa

from millrace.base.backoff import Backoff
from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import (
    AppendRejected,
    AppendUnresolved,
    LogUnavailable,
    MillraceError,
    SpoolCorrupted,
    SpoolFull,
)
from millrace.base.failpoint import hit
from millrace.base.files import sync
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.client.produce.fair_lock import FairLock
from millrace.client.produce.lane import Lane
from millrace.client.produce.rows import group_into_entries
from millrace.client.produce.sequencer import OutboundEntry
from millrace.client.spool.producer_remap import ProducerRemap
from millrace.client.spool.queue import DEFAULT_BYTES, Spool, SpoolChannel, SpoolFrame
from millrace.message.log_entries import ENTRY_SCHEMA
from millrace.message.model import MESSAGE_FIELDS, MutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.wal.reasons import Reason

OnRejected = Callable[[MutableMessage, AppendRejected], None]

SpooledMessages: TypeAlias = list[tuple[MutableMessage, int]]
"""Messages, each with the number of its frame."""

_UNKNOWN: Final = frozenset({Reason.UNKNOWN_PRODUCER, Reason.SEQUENCE_GAP})

_LONGEST_PAUSE: Final = 5.0
_log = logging.getLogger(__name__)

_OVERHEAD: Final = 256
"""Approximate maximum size of a spooled message without its payload."""


class SpoolSender:
    """Sends one producer's messages to the log, with the spool in `folder` as a buffer. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = DEFAULT_BYTES,
        on_rejected: OnRejected | None = None,
        metrics: Metrics | None = None,
        retry_delay: float = 1.0,
    ) -> None:
        self.spool = Spool(folder, max_bytes=max_bytes)
        self._on_rejected = on_rejected
        self._metrics = metrics
        self._retry_delay = retry_delay
        self._guard = threading.Lock()
        self._turns: dict[str, FairLock] = {}
        self._lane: Callable[[str], Lane] | None = None
        self._spooling: dict[str, threading.Thread] = {}
        self._unresolved: dict[str, deque[OutboundEntry]] = {}
        self._closing = threading.Event()
        self.error: MillraceError | None = None
        """The error that keeps the spool from being sent, unless the log is merely unreachable."""
        self._show()

    @classmethod
    def for_producer(
        cls,
        folder: Path | None,
        settings: Settings,
        *,
        max_bytes: int,
        on_rejected: OnRejected | None,
        metrics: Metrics | None,
    ) -> Self | None:
        """Return the sender for a producer, or None without a folder. Raises SpoolBusy."""
        if folder is None:
            return None
        delay = settings.append_retry_delay
        return cls(folder, max_bytes=max_bytes, on_rejected=on_rejected, metrics=metrics, retry_delay=delay)

    def start(self, lane: Callable[[str], Lane]) -> None:
        """Start sending what a former process left, through these lanes."""
        self._lane = lane
        for name, channel in self.spool.channels().items():
            if channel.entries:
                self._begin(name)

    @property
    def empty(self) -> bool:
        """Whether all spooled messages are settled, so that appends go directly to the log again."""
        return not self.spool.entries and not self._spooling

    def wait_empty(self, *, timeout: float) -> bool:
        """Wait until the spool is empty; return whether it is."""
        return poll_until(lambda: self.empty, Deadline.after(timeout, sleep=self._closing.wait), interval=0.02)

    def close(self) -> None:
        """Stop sending; spooled messages stay for the next process. Idempotent."""
        self._closing.set()
        for thread in list(self._spooling.values()):
            thread.join()
        self.spool.close()

    def contended(self, pchannel: str) -> bool:
        """Return whether another caller waits to send to the PChannel."""
        return self._turns_of(pchannel).contended

    def require_room(self, sizes: Sequence[int]) -> None:
        """Raise SpoolFull if the messages of one call, of these bytes, may have to be spooled and do not all fit."""
        if self._spooling:
            self._check_room(sum(size + _OVERHEAD for size in sizes))

    def deliver(
        self,
        pchannel: str,
        source: Callable[[], OutboundEntry | None],
        *,
        size: Callable[[], int] | None = None,
        pipelined: bool = True,
    ) -> None:
        """Send what `source` returns, as :meth:`Lane.deliver` does; spool what cannot be sent, in order.

        Raises LogUnavailable for a transaction's messages while the spool is in use.

        `size` returns the approximate size of the next entry; with it, SpoolFull is raised before the entry is taken
        from the source.
        """
        with self._turns_of(pchannel).held():
            lane = self._lane_of(pchannel)
            self._keep_unresolved(pchannel)
            if pchannel not in self._spooling:
                try:
                    lane.deliver(source, pipelined=pipelined, attempts=1)
                    return
                except AppendUnresolved as error:
                    self._unresolved.setdefault(pchannel, deque()).extend(lane.take_unresolved())
                    if self._keep_unresolved(pchannel):
                        raise error
            while True:
                if size is not None:
                    self._check_room(size())
                sending = source()
                if sending is None:
                    return
                if any(message.txn_id for message in sending.messages):
                    raise LogUnavailable(
                        "the log cannot be reached, or has not all that is spooled yet: begin the transaction later"
                    )
                sending.messages[:] = lane.stamp(sending.messages)
                sending.answers = [None] * len(sending.messages)
                self._spool(pchannel, sending)

    # --- spooling -----------------------------------------------------------------------------------------------------

    def _check_room(self, size: int) -> None:
        if size and self.spool.bytes + size > self.spool.max_bytes:
            if self._metrics is not None:
                self._metrics.producer_spool_refused_total.inc()
            raise SpoolFull(
                f"the log cannot be reached, and the spool holds {self.spool.bytes} of {self.spool.max_bytes} bytes:"
                " this"
                " append was not taken. Append it again when the log is back, or give the spool more room"
            )

    def _keep_unresolved(self, pchannel: str) -> bool:
        """Spool the unresolved entries, which are numbered: they go first, even beyond the limit.

        Returns whether a transaction was among them, which the caller must learn. Raises AppendUnresolved if the disk
        fails: the messages are held in memory and tried again before any other.
        """
        left = self._unresolved.get(pchannel)
        in_txn = False
        while left:
            in_txn |= any(message.txn_id for message in left[0].messages)
            try:
                self._spool(pchannel, left[0])
            except OSError as error:
                raise AppendUnresolved(
                    f"neither the log nor the spool can be reached ({error}): the newest appends are held only in"
                    " memory"
                ) from error
            left.popleft()
        return in_txn

    def _spool(self, pchannel: str, sending: OutboundEntry) -> None:
        """Store the unanswered messages of an entry durably."""
        left = [sending.messages[place] for place in sending.unanswered]
        if left:
            channel = self.spool.channel(pchannel)
            number = channel.append(encode_entry(left), force=True)
            if sending.ambiguous:
                channel.mark_attempted(number)
            self._show()
            self._begin(pchannel)
        if sending.on_settled is not None:
            sending.on_settled(sending)

    def _begin(self, pchannel: str) -> None:
        with self._guard:
            if pchannel not in self._spooling and not self._closing.is_set():
                thread = threading.Thread(target=self._drain, args=(pchannel,), name=f"spool-{pchannel}", daemon=True)
                self._spooling[pchannel] = thread
                thread.start()

    # --- draining -----------------------------------------------------------------------------------------------------

    def _drain(self, pchannel: str) -> None:
        """Send everything in order until the spool is empty; then the lane is used directly again."""
        channel = self.spool.channel(pchannel)
        renamed = ProducerRemap(channel.path)
        backoff = Backoff(self._retry_delay, _LONGEST_PAUSE)
        while not self._closing.is_set():
            try:
                # The first is sent alone: an entry that is sent while the log is unreachable may have taken effect.
                # An accepted entry is one result for the chain to remember.
                alone = itertools.islice(channel.frames(), 1)
                for frames in itertools.chain(
                    [[*alone]], group_into_entries(channel.frames(), lambda frame: len(frame.entry))
                ):
                    for run in _by_producer(frames):
                        if self._closing.is_set():
                            return
                        self._resend(pchannel, channel, renamed, run)
                        backoff.reset()
                        self.error = None
                with self._turns_of(pchannel).held():
                    if not channel.entries:
                        renamed.clear()
                        with self._guard:
                            del self._spooling[pchannel]
                        return
            except AppendUnresolved:
                pass
            except MillraceError as error:
                self.error = error
            except OSError as error:
                self.error = LogUnavailable(f"the spool cannot be read or written: {error}")
            self._lane_of(pchannel).take_unresolved()  # the spool has them
            self._show()
            self._closing.wait(backoff.next_delay())

    def _resend(self, pchannel: str, channel: SpoolChannel, renamed: ProducerRemap, run: SpooledMessages) -> None:
        """Send the messages of some frames, and record that they are settled."""
        order = {name: place for place, name in enumerate(dict.fromkeys(message.vchannel for message, _ in run))}
        run = sorted(run, key=lambda each: order[each[0].vchannel])
        last = max(number for _, number in run)
        sent = channel.attempted
        channel.mark_attempted(last)
        sending = OutboundEntry([renamed(message) for message, _ in run], answers=[None] * len(run), ambiguous=True)
        while sending.unanswered:
            try:
                self._delivered(pchannel, sending)
            except AppendRejected as verdict:
                self._lane_of(pchannel).take_unresolved()
                if verdict.reason not in _UNKNOWN:
                    raise
                self._rename(pchannel, sending, run, renamed, sent, verdict)
        hit("spool.sent")
        refused = [
            (message, answer)
            for message, answer in zip(sending.messages, sending.answers, strict=True)
            if isinstance(answer, AppendRejected)
        ]
        if refused:
            _record(self.spool.folder / "rejected.jsonl", refused)
        channel.settle(last)
        hit("spool.settled")
        self._show()
        for message, answer in refused:
            if self._on_rejected is not None:
                self._on_rejected(message, answer)

    def _delivered(self, pchannel: str, sending: OutboundEntry) -> None:
        waiting = iter([sending])
        self._lane_of(pchannel).deliver(lambda: next(waiting, None), pipelined=False, stamped=True, attempts=1)

    def _rename(
        self,
        pchannel: str,
        sending: OutboundEntry,
        run: SpooledMessages,
        renamed: ProducerRemap,
        sent: int,
        verdict: AppendRejected,
    ) -> None:
        """Handle messages that the chain does not know.

        Those whose frame number is `sent` or greater were never sent and get a new producer; the others are answered
        with the verdict.
        """
        first: dict[str, MutableMessage] = {}
        for place in sending.unanswered:
            message, number = run[place]
            if number < sent:
                words = f"an earlier send of it may have taken effect: check the WAL ({verdict})"
                sending.answers[place] = AppendRejected(words, reason=verdict.reason)
            else:
                first.setdefault(message.vchannel, message)
        if first:
            _log.warning("%s: %s; messages that were never sent get a new producer id", self.spool.folder, verdict)
            renamed.assign(first.values(), self._lane_of(pchannel).tick)
            for place in sending.unanswered:
                sending.messages[place] = renamed(run[place][0])

    # --- state --------------------------------------------------------------------------------------------------------

    def _lane_of(self, pchannel: str) -> Lane:
        assert self._lane is not None, "the spool belongs to no producer yet"
        return self._lane(pchannel)

    def _turns_of(self, pchannel: str) -> FairLock:
        with self._guard:
            return self._turns.setdefault(pchannel, FairLock())

    def _show(self) -> None:
        if self._metrics is None:
            return
        oldest = self.spool.oldest_ns
        self._metrics.producer_spool_bytes.set(self.spool.bytes)
        self._metrics.producer_spool_entries.set(self.spool.entries)
        self._metrics.producer_spool_oldest_seconds.set(
            0.0 if oldest is None else max(0.0, (time.time_ns() - oldest) / 1e9)
        )


def _by_producer(frames: Sequence[SpoolFrame]) -> Iterator[SpooledMessages]:
    """Yield the messages of frames, of one producer and epoch per VChannel at a time.

    If the chain refuses a message for now (an unopened term), it also refuses the following messages of the same
    producer and epoch. It does not know that those of another producer belong after them: an entry with both would
    change their order.
    """
    run: SpooledMessages = []
    writers: dict[str, tuple[int, int]] = {}
    for frame in frames:
        messages = _decoded(frame)
        mine = {message.vchannel: (message.producer_id, message.epoch) for message in messages}
        if any(writers.get(name, writer) != writer for name, writer in mine.items()):
            yield run
            run, writers = [], {}
        run += [(message, frame.number) for message in messages]
        writers |= mine
    if run:
        yield run


def _decoded(frame: SpoolFrame) -> list[MutableMessage]:
    entry = pa.record_batch(
        [pa.array([0]), pa.array([frame.number]), pa.array([0]), pa.array([frame.entry], pa.large_binary())],
        schema=ENTRY_SCHEMA,
    )
    found = []
    for row in decode_entries(entry).to_pylist():
        if row["type"] == MessageType.UNDEFINED:
            raise SpoolCorrupted(f"frame {frame.number} of the spool holds no messages: {row['detail']}")
        found.append(MutableMessage(**{name: row[name] for name in MESSAGE_FIELDS}))
    return found


def _record(path: Path, refused: list[tuple[MutableMessage, AppendRejected]]) -> None:
    """Record durably the messages that the chain rejected."""
    lines = []
    for message, answer in refused:
        line: dict[str, Any] = {name: getattr(message, name) for name in MESSAGE_FIELDS if name != "payload"}
        line |= {"reason": answer.reason, "words": str(answer), "at": time.time()}
        line["payload"] = base64.b64encode(message.payload).decode("ascii")
        lines.append(json.dumps(line))
    made = not path.exists()
    with path.open("a", encoding="ascii") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        sync(file.fileno())
    if made:
        sync(path.parent)
