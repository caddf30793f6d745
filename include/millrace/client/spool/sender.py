"""Sending with a spool behind it: straight to the log while that can be reached, else into the spool, and from there in order.

- While a PChannel's spool is not empty, new appends go behind what it holds.
- Messages keep the producer, epoch and sequence that they were given before they were spooled, so that sending one again has no
  second effect, across kill -9 of this process too (law 8). Progress is written down behind each retransmitted entry.
- Where the chain does not know a spooled message's producer any more, it goes out as a new one's, with all that follows, if it was never
  sent (millrace.client.spool.producer_remap). Of one that was perhaps sent nobody can know: it is recorded as rejected, and the rest goes on.
- What the chain rejects of it is written to ``rejected.jsonl``, synced and with its bytes, before it counts as settled, and is
  handed to `on_rejected`. A message of which the chain no longer remembers the result (ALREADY_APPLIED, after a crash) is
  written there too: it took effect, and the WAL says how.
- Transactions need answers and are not spooled: LogUnavailable while the spool is in use.
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

from millrace.base.backoff import jittered
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
from millrace.client.produce.framing import group_into_entries, group_messages
from millrace.client.produce.lane import Lane
from millrace.client.produce.sequencer import OutboundEntry
from millrace.client.produce.written import Written
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
"""Messages, each with the number of the frame that it stands in."""

_UNKNOWN: Final = frozenset({Reason.UNKNOWN_PRODUCER, Reason.SEQUENCE_GAP})

_LONGEST_PAUSE: Final = 5.0
_log = logging.getLogger(__name__)

_OVERHEAD: Final = 256
"""Bytes of a spooled message beside its payload, at most about."""


class SpoolSender:
    """The way of one producer's messages to the log, with the spool in `folder` behind it. Thread-safe."""

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
        """What keeps the spool from being sent, where that is more than a log that cannot be reached."""
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
        """The sender that a producer is to have: none without a folder. Raises SpoolBusy."""
        if folder is None:
            return None
        delay = settings.append_retry_delay
        return cls(folder, max_bytes=max_bytes, on_rejected=on_rejected, metrics=metrics, retry_delay=delay)

    def start(self, lane: Callable[[str], Lane]) -> None:
        """Begin to send what a former process left, by these lanes."""
        self._lane = lane
        for name, channel in self.spool.channels().items():
            if channel.entries:
                self._begin(name)

    @property
    def empty(self) -> bool:
        """Whether everything that was spooled is settled, so that appends go straight to the log again."""
        return not self.spool.entries and not self._spooling

    def wait_empty(self, *, timeout: float) -> bool:
        """Wait until the spool is empty; whether it is."""
        return poll_until(lambda: self.empty, Deadline.after(timeout, sleep=self._closing.wait), interval=0.02)

    def close(self) -> None:
        """Stop sending; what is spooled stays for the next process. Idempotent."""
        self._closing.set()
        for thread in list(self._spooling.values()):
            thread.join()
        self.spool.close()

    def contended(self, pchannel: str) -> bool:
        """Whether another caller waits to send to the PChannel."""
        return self._turns_of(pchannel).contended

    def require_room(self, messages: Sequence[MutableMessage]) -> None:
        """Raise SpoolFull where these messages, of one call, may have to be spooled and there is no room for all of them."""
        if self._spooling:
            self._check_room(sum(len(message.payload) + _OVERHEAD for message in messages))

    def send(self, pchannel: str, messages: list[MutableMessage]) -> Written:
        """Append messages, or spool them (`spooled_rows`), after :meth:`require_room`. Raises LogUnavailable for a transaction's."""
        order = {name: place for place, name in enumerate(dict.fromkeys(message.vchannel for message in messages))}
        groups = list(group_messages(sorted(messages, key=lambda each: order[each.vchannel])))
        sent = [OutboundEntry(group) for group in groups]
        waiting = iter(sent)
        self.deliver(pchannel, lambda: next(waiting, None), pipelined=len(sent) > 1)
        written = Written()
        for each in sent:
            written.add(each.written())
            spooled = sum(each.messages[place].rows for place in each.unanswered)
            written.rows += spooled
            written.spooled_rows += spooled
        return written

    def deliver(
        self,
        pchannel: str,
        source: Callable[[], OutboundEntry | None],
        *,
        size: Callable[[], int] | None = None,
        pipelined: bool = True,
    ) -> None:
        """Send what `source` gives, as :meth:`Lane.deliver` does; what cannot be sent is spooled, in its order.

        With `size`, which says about how many bytes come next, SpoolFull is raised before they are taken of the source.
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

    # --- into the spool -------------------------------------------------------------------------------------------------

    def _check_room(self, size: int) -> None:
        if size and self.spool.bytes + size > self.spool.max_bytes:
            if self._metrics is not None:
                self._metrics.producer_spool_refused_total.inc()
            raise SpoolFull(
                f"the log cannot be reached, and the spool holds {self.spool.bytes} of {self.spool.max_bytes} bytes: this"
                " append was not taken. Append it again when the log is back, or give the spool more room"
            )

    def _keep_unresolved(self, pchannel: str) -> bool:
        """Spool what was sent and could not be settled: it has numbers, so that it goes first, and whatever room there is.

        Returns whether a transaction was among it, which the caller must be told. Raises AppendUnresolved where the disk
        refuses: the messages are held in memory, and tried again before any other.
        """
        left = self._unresolved.get(pchannel)
        in_txn = False
        while left:
            in_txn |= any(message.txn_id for message in left[0].messages)
            try:
                self._spool(pchannel, left[0])
            except OSError as error:
                raise AppendUnresolved(
                    f"neither the log nor the spool can be reached ({error}): the newest appends are held in memory alone"
                ) from error
            left.popleft()
        return in_txn

    def _spool(self, pchannel: str, sending: OutboundEntry) -> None:
        """Make what is open of a Sending durable here."""
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

    # --- out of it --------------------------------------------------------------------------------------------------------

    def _drain(self, pchannel: str) -> None:
        """Send everything in order, until nothing is left: from then on the lane is used directly again."""
        channel = self.spool.channel(pchannel)
        renamed = ProducerRemap(channel.path)
        pause = self._retry_delay
        while not self._closing.is_set():
            try:
                # The first goes alone: of what is sent while the log is away nobody knows afterwards whether it was taken.
                # An entry is one result for the chain to remember, if it is accepted.
                alone = itertools.islice(channel.frames(), 1)
                for frames in itertools.chain(
                    [[*alone]], group_into_entries(channel.frames(), lambda frame: len(frame.entry))
                ):
                    for run in _by_producer(frames):
                        if self._closing.is_set():
                            return
                        self._send_again(pchannel, channel, renamed, run)
                        pause, self.error = self._retry_delay, None
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
            self._closing.wait(jittered(pause))
            pause = min(2 * pause, max(_LONGEST_PAUSE, self._retry_delay))

    def _send_again(self, pchannel: str, channel: SpoolChannel, renamed: ProducerRemap, run: SpooledMessages) -> None:
        """Send the messages of a run of frames, and note that they are settled."""
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
        """The chain knows nothing of what is open of `sending`: what was never sent (its frame is none before `sent`) goes out under
        new names, the rest is answered with the verdict."""
        first: dict[str, MutableMessage] = {}
        for place in sending.unanswered:
            message, number = run[place]
            if number < sent:
                words = f"nobody knows whether it took effect before: the WAL does ({verdict})"
                sending.answers[place] = AppendRejected(words, reason=verdict.reason)
            else:
                first.setdefault(message.vchannel, message)
        if first:
            _log.warning("%s: %s; what was never sent goes out as a new producer's", self.spool.folder, verdict)
            renamed.assign(first.values(), self._lane_of(pchannel).tick)
            for place in sending.unanswered:
                sending.messages[place] = renamed(run[place][0])

    # --- beside it --------------------------------------------------------------------------------------------------------

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
    """The messages of frames, of one producer and epoch for a VChannel at a time.

    Of what one producer wrote in an epoch the chain takes nothing behind what it refuses for now (a term that is none). It does not know
    that what another wrote comes behind that: an entry with both would change their order.
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
    """Write down, durably, what the chain rejected."""
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
