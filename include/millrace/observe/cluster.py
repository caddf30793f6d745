"""The cluster as it is seen: nodes, who owns what, how it came there. From the meta store, which is opened when it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final, Literal

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.coord import control
from millrace.coord.channels.record import AssignmentState, ChannelRecord
from millrace.coord.clock import Clock
from millrace.coord.store_factory import open_cluster_store, require_cluster
from millrace.meta.store import MetaStore
from millrace.observe.broadcasts import BroadcastRow, broadcast_rows
from millrace.observe.models import BaseView

MAX_MOVES: Final = 200
MAX_BROADCASTS_SHOWN: Final = 20
"""With the rest; more by themselves."""


class NodeRow(BaseView):
    """A node."""

    name: str
    state: Literal["up", "draining", "drained", "gone"]
    session: str
    """"" where it has none."""
    address: str
    roles: list[str]
    pchannels: list[str]
    """Of which it owns a role, or is to."""


class MoveRow(BaseView):
    """A role of a PChannel came to be at a node."""

    pchannel: str
    role: str
    term: int
    source: str
    """The node that had it before; "" for the first."""
    to: str
    cause: str
    began: float
    ended: float


class ChannelRow(BaseView):
    """A role of a PChannel."""

    pchannel: str
    role: str
    state: AssignmentState
    term: int
    node: str
    session: str
    address: str
    cause: str
    not_let_go: list[str]
    """Sessions that had it before, and were not seen to have let go."""
    moves: list[MoveRow]
    """Newest first."""


class BalanceView(BaseView):
    """Who leads, and what people asked for."""

    leader: str
    """"" where nobody leads: what is assigned stays so."""
    service: str
    """Where the leader serves."""
    frozen: bool
    """Whether nothing moves for balance alone."""
    draining: list[str]


class ClusterView(BaseView):
    """All of it."""

    present: bool
    """False: one node, without a coordinator."""
    balance: BalanceView | None = None
    nodes: tuple[NodeRow, ...] = ()
    channels: tuple[ChannelRow, ...] = ()
    moves: tuple[MoveRow, ...] = ()
    """Newest first, at most MOST_MOVES."""
    broadcasts: tuple[BroadcastRow, ...] = ()


class ClusterReader(Closeable):
    """The meta store of a deployment, opened once there is one. Thread-safe."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._store: Any = None

    def store(self) -> MetaStore:
        """Raises InvalidSettings where there is no cluster, MetaUnavailable, UnsupportedVersion."""
        with self._lock:
            if self._store is None:
                require_cluster(self.settings)
                self._store = open_cluster_store(self.settings, self._clock)
            found: MetaStore = self._store
            return found

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def view(self) -> ClusterView:
        """Everything, or that there is no cluster. Raises MetaUnavailable, UnsupportedVersion."""
        try:
            store = self.store()
        except InvalidSettings:
            return ClusterView(present=False, broadcasts=self._broadcasts())
        found = channel_rows(store)
        return ClusterView(
            present=True,
            balance=balance_view(store),
            nodes=tuple(node_rows(store)),
            channels=tuple(found),
            moves=tuple(newest_moves(found, limit=MAX_MOVES)),
            broadcasts=self._broadcasts(),
        )

    def _broadcasts(self) -> tuple[BroadcastRow, ...]:
        return tuple(broadcast_rows(self.settings, limit=MAX_BROADCASTS_SHOWN))


def node_of(session: str) -> str:
    """The name of a session's node."""
    return session.rpartition("@")[0]


def node_rows(store: MetaStore) -> list[NodeRow]:
    return [
        NodeRow(
            name=each.name,
            state=each.state,
            session=each.session,
            address=each.address,
            roles=list(each.roles),
            pchannels=list(each.owns),
        )
        for each in control.nodes(store)
    ]


def channel_rows(store: MetaStore) -> list[ChannelRow]:
    return [_channel(record) for record in control.channels(store)]


def _channel(record: ChannelRecord) -> ChannelRow:
    owner = record.owner
    return ChannelRow(
        pchannel=record.pchannel,
        role=record.role,
        state=record.state,
        term=record.term,
        node="" if owner is None else node_of(owner.session),
        session="" if owner is None else owner.session,
        address="" if owner is None else owner.address,
        cause=record.cause,
        not_let_go=[each.session for each in record.history],
        moves=[
            MoveRow(
                pchannel=record.pchannel,
                role=record.role,
                term=move.term,
                source=node_of(move.source),
                to=node_of(move.to),
                cause=move.cause,
                began=move.began,
                ended=move.ended,
            )
            for move in reversed(record.moves)
        ],
    )


def newest_moves(channels: Iterable[ChannelRow], *, limit: int) -> list[MoveRow]:
    """The newest moves of all of them."""
    found = (move for each in channels for move in each.moves)
    return sorted(found, key=lambda move: (move.ended, move.pchannel, move.role), reverse=True)[:limit]


def balance_view(store: MetaStore) -> BalanceView:
    asked = control.read_control_state(store)
    name, service = control.leader(store)
    return BalanceView(leader=name, service=service, frozen=asked.frozen, draining=sorted(asked.drains))
