"""Receive messages beside a flow's tasks, and store them in the capture's spool.

A thread reads messages from the socket into a bounded buffer; when it is full, messages are dropped and counted. From
there they go into the spool, each batch in one synced transaction with the counts. Messages in the spool are never
lost; messages in transit when the process ends are.
"""

from __future__ import annotations

import base64
import logging
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec

from millrace.base.closeable import Closeable
from millrace.base.errors import LogUnavailable
from millrace.base.extras import missing_extra_error, require_extras
from millrace.base.settings import Settings
from millrace.flows.declare.addresses import address_of
from millrace.flows.documents import JSON_ERRORS, decoded
from millrace.flows.sources.capture.lane import CapturedTables
from millrace.flows.sources.capture.polling import PolledRows, Poller, PollingFeeder, append, line_of
from millrace.flows.sources.capture.spool import Spool
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.direct.losses import SequenceTracker
from millrace.flows.sources.direct.model import DirectSource
from millrace.flows.sources.source import SourceLag

BATCH: Final = 5_000
"""The most messages that are stored at once."""
_WAIT_SECONDS: Final = 0.1
_SO_RXQ_OVFL: Final = 40
"""Linux: each datagram comes with the number of datagrams that the kernel dropped on this socket before it."""
_MAX_TEXT: Final = 64 << 10
"""The most bytes of an unreadable message in its dead letter."""
_RECEIVE_BYTES: Final = 8 << 20
"""The requested size of the kernel's own buffer."""
COUNTS: Final = "counts"

_log: Final = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """A message."""

    sender: str
    data: bytes
    milliseconds: int
    truncated: bool = False


class Receiver(Closeable, ABC):
    """A socket and its waiting messages. One thread takes them."""

    def __init__(self, declared: DirectSource) -> None:
        self._declared = declared
        self._max_messages, self._max_bytes = declared.buffer_messages, declared.buffer_mib << 20
        self._changed = threading.Condition()
        self._waiting: deque[Arrived] = deque()
        self._bytes = 0
        self._counts = Counter[str]()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="direct-source", daemon=True)

    @abstractmethod
    def _receive(self) -> list[Arrived]:
        """Return the next messages, or none after a short wait."""

    @abstractmethod
    def _release(self) -> None:
        """Close the socket."""

    def start(self) -> None:
        self._thread.start()

    def take(self, most: int) -> tuple[list[Arrived], Counter[str]]:
        """Return up to `most` messages, and the counts since the last call. Raises the error that ended the thread."""
        with self._changed:
            if self._error is not None and not self._waiting:
                raise self._error
            found = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._bytes -= sum(len(each.data) for each in found)
            counts, self._counts = self._counts, Counter()
        return found, counts

    def wait(self, seconds: float) -> None:
        """Wait until a message arrives, for up to `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._error is not None, seconds)

    def count(self, name: str, number: int = 1) -> None:
        with self._changed:
            self._counts[name] += number

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for each in self._receive():
                    self._put(each)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _put(self, message: Arrived) -> None:
        with self._changed:
            self._counts["received"] += 1
            self._counts["truncated"] += message.truncated
            if len(self._waiting) >= self._max_messages or self._bytes + len(message.data) > self._max_bytes:
                self._counts["dropped"] += 1
                return
            self._waiting.append(message)
            self._bytes += len(message.data)
            self._changed.notify_all()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._release()


class UdpReceiver(Receiver):
    """Datagrams of a port, or of a multicast group."""

    def __init__(self, declared: DirectSource) -> None:
        super().__init__(declared)
        self._size = declared.max_bytes
        self._kernel_dropped: int | None = None
        host = address_of(declared.host)
        assert host is not None, "checked by the declaration"
        family = socket.AF_INET if host.version == 4 else socket.AF_INET6
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.settimeout(_WAIT_SECONDS)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
            if host.is_multicast:
                # Other processes of this host may read the group, too. A unicast port is never shared.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Bound to the group itself, so that datagrams to other addresses of the port are not received.
            self._socket.bind((str(host), declared.port))
            if host.is_multicast:
                self._join(str(host), family, declared.interface)
        except OSError as error:
            self._socket.close()
            raise LogUnavailable(f"{declared.words} cannot listen: {error}") from None

    def _join(self, group: str, family: int, interface: str) -> None:
        packed = socket.inet_pton(family, group)
        if family == socket.AF_INET:
            own = socket.inet_aton(interface or "0.0.0.0")
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, packed + own)
        else:
            index = _interface_index(interface) if interface else 0
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, packed + struct.pack("@I", index))

    @property
    def port(self) -> int:
        """The port that it is bound to."""
        return int(self._socket.getsockname()[1])

    def _receive(self) -> list[Arrived]:
        try:
            data, ancillary, flags, sender = self._socket.recvmsg(self._size, socket.CMSG_SPACE(4))
        except TimeoutError:
            return []
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, _SO_RXQ_OVFL):
                dropped = struct.unpack("=I", value)[0]
                before, self._kernel_dropped = self._kernel_dropped or 0, dropped
                self.count("dropped_by_kernel", (dropped - before) % (1 << 32))
        truncated = bool(flags & socket.MSG_TRUNC)
        return [Arrived(f"{sender[0]}:{sender[1]}", data, time.time_ns() // 1_000_000, truncated)]

    def _release(self) -> None:
        self._socket.close()


def _interface_index(address: str) -> int:
    import psutil

    for name, known in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in known):
            return socket.if_nametoindex(name)
    raise LogUnavailable(f"no network interface of this host has the address {address}")


class ZeroMqReceiver(Receiver):
    """Messages of a ZeroMQ socket. The last of several frames is the message; the first names the sender."""

    def __init__(self, declared: DirectSource) -> None:
        super().__init__(declared)
        try:
            import zmq
        except ModuleNotFoundError as error:
            raise missing_extra_error(error) or error from None
        self._zmq = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB if declared.socket == "sub" else zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, declared.buffer_messages)
        self._socket.setsockopt(zmq.MAXMSGSIZE, declared.max_bytes)
        self._socket.setsockopt(zmq.IPV6, int(":" in declared.host))
        for prefix in declared.subscriptions if declared.socket == "sub" else ():
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix.encode())
        try:
            (self._socket.connect if declared.connect else self._socket.bind)(f"tcp://{declared.address}")
        except zmq.ZMQError as error:
            self._release()
            raise LogUnavailable(f"{declared.words} cannot be reached: {error}") from None

    def _receive(self) -> list[Arrived]:
        if not self._socket.poll(int(1000 * _WAIT_SECONDS)):
            return []
        *topic, data = self._socket.recv_multipart(self._zmq.NOBLOCK)
        sender = b"/".join(topic)[:255].decode(errors="replace")
        return [Arrived(sender, data, time.time_ns() // 1_000_000)]

    def _release(self) -> None:
        self._socket.close()
        self._context.term()


class DirectPoller(Poller[Receiver]):
    """Stores a receiver's messages, and counts missing ones."""

    def __init__(self, declared: DirectSource) -> None:
        self._declared = declared
        self._counts = Counter[str]()
        self._tracker: SequenceTracker | None = None
        self._receiver: Receiver | None = None

    def begin(self, connection: Receiver, spool: Spool) -> None:
        """Initialise from the spool."""
        now = spool.standing()
        if now.offset is None:
            spool.begin_epoch()
        found: Mapping[str, Any] = now.offset or {}
        self._counts = Counter(found.get(COUNTS, {}))
        numbers = self._declared.sequence
        if numbers is not None:
            self._tracker = SequenceTracker(None if numbers.field else numbers.width, found.get("greatest", {}))
        self._receiver = connection
        if now.offset is None:
            append(spool, (), (), self._offset())

    def poll(self, connection: Receiver, spool: Spool, room: Callable[[], bool], /) -> None:
        """Store the waiting messages."""
        while room():
            arrived, counts = connection.take(BATCH)
            if not arrived and not counts:
                return
            lines = [self._line(each) for each in arrived]
            self._counts += counts
            if self._tracker is not None:
                self._counts.update(self._tracker.counts)  # fewer may be lost than before
                self._tracker.counts.clear()
            topic = self._declared.names[0]
            append(spool, [(topic, line) for line in lines], [len(lines)] if lines else [], self._offset())
            if len(arrived) < BATCH:
                return

    def wait(self, stop: threading.Event, seconds: float, /) -> None:
        """Wait until a message arrives."""
        if self._receiver is not None and not stop.is_set():
            self._receiver.wait(seconds)

    def _offset(self) -> dict[str, Any]:
        greatest = {} if self._tracker is None else {"greatest": self._tracker.greatest()}
        return {COUNTS: {name: number for name, number in self._counts.items() if number}, **greatest}

    def _line(self, message: Arrived) -> bytes:
        declared, fault = self._declared, ""
        after: dict[str, Any] | msgspec.Raw | None = None
        document: Any = None
        if message.truncated:
            fault = f"the datagram is longer than max_bytes ({declared.max_bytes}) and was cut"
        elif declared.format == "bytes":
            after = {"payload": base64.b64encode(message.data).decode(), "sender": message.sender}
        else:
            try:
                document = decoded(message.data)
                after = msgspec.Raw(message.data)
            except JSON_ERRORS as error:
                fault = f"not JSON: {error}"
            if not fault and not isinstance(document, dict):
                fault, after = "the message is not a JSON object", None
        numberless = self._numbered(message, document)  # what is put aside has come, so it is not lost
        fault = fault or numberless
        if fault:
            self._counts["malformed"] += not message.truncated
            text = message.data[:_MAX_TEXT].decode(errors="replace")
            words = f"from {message.sender or 'a sender'}: {fault}"
            return line_of("c", milliseconds=message.milliseconds, place=message.sender, fault=words, text=text)
        return line_of("c", after=after, milliseconds=message.milliseconds, place=message.sender)

    def _numbered(self, message: Arrived, document: Any) -> str:
        """Track a message's number. Return what is wrong with it, or an empty text; `document` is no dict if that is
        known already.
        """
        numbers = self._declared.sequence
        if numbers is None or self._tracker is None:
            return ""
        if numbers.field:
            if not isinstance(document, dict):
                return ""
            number = document.get(numbers.field)
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 64:
                return f"its field {numbers.field!r} is not a sequence number"
        else:
            part = message.data[numbers.offset : numbers.offset + numbers.width]
            if len(part) < numbers.width:
                return "it is too short to contain its number"
            number = int.from_bytes(part, numbers.order)
        self._tracker.see(message.sender, number)
        return ""


class DirectMessages(CapturedTables):
    """The lane of a socket's messages."""

    def lag(self) -> SourceLag:
        """Return the lag, with the counts of messages."""
        now = self._spool.standing()
        counts = (now.offset or {}).get(COUNTS, {})
        return SourceLag(now.lag_bytes, now.lag_seconds, now.error, {name: int(each) for name, each in counts.items()})


@contextmanager
def receiving(declared: DirectSource) -> Iterator[Receiver]:
    """Listen as declared. Raises LogUnavailable, InvalidSettings."""
    with (UdpReceiver if declared.transport == "udp" else ZeroMqReceiver)(declared) as found:
        found.start()
        yield found


def source_of(declared: DirectSource, settings: Settings, *, group: str, standing: Mapping[str, int]) -> DirectMessages:
    """Return the declared source."""
    return DirectMessages(spool_folder(settings, group), declared.names)


def reader_of(declared: DirectSource, settings: Settings, *, group: str, topic: str, partition: int) -> PolledRows:
    """Return a reader of the declared source."""
    return PolledRows(spool_folder(settings, group), topic)


def feeder_of(declared: DirectSource, settings: Settings, *, group: str) -> PollingFeeder:
    """Start and return the receiver's feeder. Raises InvalidSettings, StreamBusy."""
    if declared.transport == "zeromq":
        require_extras("zeromq")  # fail here, not in the thread
    return PollingFeeder(
        lambda: receiving(declared), declared.words, spool_folder(settings, group), DirectPoller(declared),
        every_seconds=1.0, max_bytes=declared.spool_mib << 20,
    )  # fmt: skip
