"""Limits on a log server's connections: their number, and the time and bytes allowed before authentication.

Flight's server reads a whole request of any size before it checks the token, and accepts any number of connections;
neither can be configured from Python. So a thread inspects the server's sockets every few milliseconds and asks the
kernel how many bytes arrived. It shuts connections that exceed a limit, as if the client had disconnected:

- a connection without an authenticated call within `unauthenticated_seconds`, or with more than
  `unauthenticated_bytes`;
- a connection whose token was revoked or has expired, within SWEEP_SECONDS after the server knows;
- beyond `connections`: the oldest unauthenticated one; else the one silent for longest, if for `idle_seconds`; else
  the new one. Clients reconnect by themselves, so closing an idle connection costs its client only that.

Data that arrives between two checks is buffered: some MiB, more on a busy machine. TCP keep-alive detects dead peers.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from millrace.access.grants import Caller

_log = logging.getLogger(__name__)

_LOOK: Final = 0.005
"""Seconds between two checks for a new connection (the next free descriptor) and of unauthenticated ones."""
_REST_LOOK: Final = 0.02
"""The same while the server is idle: each check wakes this thread, and 200 wakes a second are 2 % of a core."""
_RESTS_AFTER: Final = 1.0
"""Seconds without a new or unauthenticated connection after which the server counts as idle."""
SWEEP_SECONDS: Final = 0.25
"""Seconds between two checks of all descriptors."""
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_TCP_INFO_BYTES: Final = 136
_LAST_RECEIVED: Final = struct.Struct("@I")
_LAST_RECEIVED_AT: Final = 52
_RECEIVED: Final = struct.Struct("@Q")
_RECEIVED_AT: Final = 128
"""Fields of Linux' struct tcp_info: milliseconds since the last data, and bytes received."""

Peer = tuple[str, int]
_NOBODY: Final[tuple[float, frozenset[Caller]]] = (0.0, frozenset())


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections and streams."""

    connections: int = 512
    streams: int = 256
    """Append streams open at once; each uses up to three threads."""
    unauthenticated_bytes: int = 1 << 20
    unauthenticated_seconds: float = 10.0
    idle_seconds: float = 300.0


@dataclass(slots=True)
class _Connection:
    peer: Peer
    inode: int
    since: float


class ConnectionGuard:
    """Watches the connections to `port` of this process, from :meth:`start` to :meth:`close`."""

    def __init__(self, port: int, limits: ConnectionLimits) -> None:
        self._port = port
        self._limits = limits
        self._open: dict[int, _Connection] = {}
        self._unknown: set[int] = set()
        self._other: dict[int, int] = {}
        self._welcome: dict[Peer, tuple[float, frozenset[Caller]]] = {}
        self._welcoming = threading.Lock()
        self._room_wanted = threading.Event()
        self._closed = threading.Event()
        self._used = time.monotonic()
        self.refused = 0
        """Number of connections shut here."""
        self._thread = threading.Thread(target=self._watch, name="log-server-connections", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def welcome(self, peer: str, caller: Caller) -> None:
        """Record an authenticated call of `caller` from `peer`, as Flight names it."""
        name, alone = _peer(peer), frozenset((caller,))
        with self._welcoming:
            _, before = self._welcome.get(name, (0.0, alone))
            self._welcome[name] = time.monotonic(), before if caller in before else before | alone

    def make_room(self) -> None:
        """Request a free stream: shut the connection that has been silent longest, if it was for `idle_seconds`."""
        self._room_wanted.set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unused_seconds(self) -> float:
        """Seconds without a connection; 0 while there is one."""
        return 0.0 if self._open else time.monotonic() - self._used

    def close(self) -> None:
        """Stop watching. Connections stay open."""
        self._closed.set()
        self._thread.join(5.0)

    def shut_all(self) -> None:
        """Shut remaining connections after :meth:`close`, so that streams held open by clients end."""
        for descriptor in list(self._open):
            self._shut_descriptor(descriptor, "the server has stopped")

    # --- the watching thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        free, swept, busy = -1, 0.0, time.monotonic()
        now = busy
        while not self._closed.wait(_LOOK if now - busy < _RESTS_AFTER else _REST_LOOK):
            now = time.monotonic()
            try:
                if now >= swept + SWEEP_SECONDS:
                    swept, free = now, _next_free()
                    self._sweep(now)
                elif (found := _next_free()) != free:
                    free = found
                    self._scan(now)
                if self._unknown:
                    busy = now
                for descriptor in list(self._unknown):
                    self._judge(descriptor, now)
                if self._room_wanted.is_set():
                    self._room_wanted.clear()
                    self._shut_idlest()
            except Exception:
                # The server continues, and its guard must as well.
                _log.exception("the check of connections failed")

    def _scan(self, now: float) -> None:
        """Find new connections."""
        present = set()
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            present.add(descriptor)
            try:
                status = os.stat(descriptor)
            except OSError:
                continue
            inode = status.st_ino
            if not stat.S_ISSOCK(status.st_mode):
                continue
            known = self._open.get(descriptor)
            if self._other.get(descriptor) == inode or (known is not None and known.inode == inode):
                continue
            if known is not None:
                self._forget(descriptor)
            with _socket(descriptor, inode) as found:
                if found is None or not self._is_ours(found):
                    self._other[descriptor] = inode
                    continue
                with suppress(OSError):  # gone again
                    self._begin(descriptor, _Connection(_address(found.getpeername()), inode, now), found)
        for gone in self._other.keys() - present:
            del self._other[gone]

    def _is_ours(self, found: socket.socket) -> bool:
        """Return whether a socket is a connection to this server's port."""
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return not listens and found.getsockname()[1] == self._port

    def _begin(self, descriptor: int, connection: _Connection, found: socket.socket) -> None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            found.setsockopt(socket.IPPROTO_TCP, option, value)
        self._open[descriptor] = connection
        self._unknown.add(descriptor)
        if len(self._open) > self._limits.connections:
            self._shut_one()

    def _judge(self, descriptor: int, now: float) -> None:
        """Mark an unauthenticated connection as authenticated, or shut it if it exceeds a limit."""
        connection = self._open[descriptor]
        if connection.peer in self._welcome:
            self._unknown.discard(descriptor)
            return
        with _socket(descriptor, connection.inode) as found:
            if found is None:
                self._forget(descriptor)
            elif now - connection.since > self._limits.unauthenticated_seconds:
                self._shut(found, descriptor, f"no call with a token in {self._limits.unauthenticated_seconds:g} s")
            elif _received(found) > self._limits.unauthenticated_bytes:
                self._shut(found, descriptor, f"more than {self._limits.unauthenticated_bytes} bytes without a token")

    def _sweep(self, now: float) -> None:
        """Check all descriptors, and forget closed connections."""
        self._scan(now)
        for descriptor, connection in list(self._open.items()):
            try:
                gone = os.stat(descriptor).st_ino != connection.inode
            except OSError:
                gone = True
            if gone:
                self._forget(descriptor)
            elif not all(caller.is_valid() for caller in self._welcome.get(connection.peer, _NOBODY)[1]):
                self._shut_descriptor(descriptor, "its token was revoked or has expired")
        # A call can be authenticated before its connection is found here.
        there = {each.peer for each in self._open.values()}
        for peer, (since, _) in list(self._welcome.items()):
            if peer not in there and now - since > self._limits.unauthenticated_seconds:
                self._welcome.pop(peer, None)

    def _forget(self, descriptor: int) -> None:
        self._unknown.discard(descriptor)
        self._used = time.monotonic()
        self._welcome.pop(self._open.pop(descriptor).peer, None)

    def _shut_one(self) -> None:
        """Make room for the newest connection, or shut it."""
        newest = next(reversed(self._open))
        # A connection that authenticated since the last look is still among the unknown ones.
        unknown = [
            (each.since, key)
            for key, each in self._open.items()
            if key in self._unknown and each.peer not in self._welcome
        ]
        oldest = min(unknown, default=(0.0, newest))[1]
        if oldest != newest or not self._shut_idlest():
            self._shut_descriptor(oldest, "too many connections")

    def _shut_idlest(self) -> bool:
        """Shut the connection that has been silent longest, if for long enough."""
        silent = []
        for descriptor, connection in self._open.items():
            with _socket(descriptor, connection.inode) as found:
                if found is not None:
                    silent.append((_silence(found), descriptor))
        seconds, descriptor = max(silent, default=(0.0, -1))
        if not silent or seconds < self._limits.idle_seconds:
            return False
        self._shut_descriptor(descriptor, f"silent for {seconds:.0f} s while others wait")
        return True

    def _shut_descriptor(self, descriptor: int, reason: str) -> None:
        with _socket(descriptor, self._open[descriptor].inode) as found:
            if found is None:
                self._forget(descriptor)
            else:
                self._shut(found, descriptor, reason)

    def _shut(self, found: socket.socket, descriptor: int, reason: str) -> None:
        peer = self._open[descriptor].peer
        self.refused += 1
        _log.warning("shut the connection from %s:%d: %s", *peer, reason)
        self._forget(descriptor)
        with suppress(OSError):  # gone already
            found.shutdown(socket.SHUT_RDWR)


def _next_free() -> int:
    """Return the lowest free descriptor. It changes when a descriptor was opened."""
    try:
        free = os.dup(0)
    except OSError:
        return -1
    os.close(free)
    return free


@contextmanager
def _socket(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield Flight's socket `descriptor` under a duplicate descriptor; None if it is closed or another one by now."""
    try:
        own = os.dup(descriptor)
    except OSError:
        yield None
        return
    status = os.fstat(own)
    if not stat.S_ISSOCK(status.st_mode):
        # The descriptor now belongs to a file. The duplicate must stay open: closing any descriptor of a file drops
        # all locks that this process has on it (POSIX), including SQLite's on the catalog and RocksDB's on the index.
        yield None
        return
    try:
        if status.st_ino != inode:
            raise OSError
        found = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        yield None
        return
    with found:
        yield found


def _info(found: socket.socket, what: struct.Struct, offset: int) -> int:
    try:
        value: int = what.unpack_from(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES), offset)[0]
    except (OSError, struct.error):
        return 0  # closed concurrently
    return value


def _received(found: socket.socket) -> int:
    return _info(found, _RECEIVED, _RECEIVED_AT)


def _silence(found: socket.socket) -> float:
    return _info(found, _LAST_RECEIVED, _LAST_RECEIVED_AT) / 1000


def _peer(name: str) -> Peer:
    """Flight's name of a peer, such as ``ipv4:127.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``."""
    host, _, port = unquote(name).rpartition(":")
    host = host.partition(":")[2].strip("[]").partition("%")[0]
    return host.removeprefix("::ffff:"), int(port) if port.isdecimal() else 0


def _address(name: tuple[object, ...]) -> Peer:
    host = str(name[0]).partition("%")[0]
    return host.removeprefix("::ffff:"), int(str(name[1]))
