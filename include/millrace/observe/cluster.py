"""Views of the cluster: nodes, channel ownership and moves.

Read from the meta store, which is opened once it exists.
"""

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
"""Broadcasts shown with the cluster. Their own view shows more."""


class NodeRow(BaseView):
    """A node."""

    name: str
    state: Literal["up", "draining", "drained", "gone"]
    session: str
    """"" if it has none."""
    address: str
    roles: list[str]
    pchannels: list[str]
    """PChannels with a role that the node owns, or is about to own."""


class MoveRow(BaseView):
    """The move of a PChannel's role to a node."""

    pchannel: str
    role: str
    term: int
    source: str
    """Previous owner. "" for the first."""
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
    """Sessions of previous owners that have not confirmed the release."""
    moves: list[MoveRow]
    """Newest first."""


class BalanceView(BaseView):
    """The leader, and what operators requested."""

    leader: str
    """"" if there is no leader. Assignments then stay as they are."""
    service: str
    """Address of the leader."""
    frozen: bool
    """Whether channels are not moved for balance alone."""
    draining: list[str]


class ClusterView(BaseView):
    """The whole cluster."""

    present: bool
    """False for a single node without a coordinator."""
    balance: BalanceView | None = None
    nodes: tuple[NodeRow, ...] = ()
    channels: tuple[ChannelRow, ...] = ()
    moves: tuple[MoveRow, ...] = ()
    """Newest first, at most MAX_MOVES."""
    broadcasts: tuple[BroadcastRow, ...] = ()


class ClusterReader(Closeable):
    """Reads the meta store of a deployment, opened once it exists. Thread-safe."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._store: Any = None

    def store(self) -> MetaStore:
        """Return the meta store. Raises InvalidSettings if there is no cluster, MetaUnavailable, UnsupportedVersion."""
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
        """Return the view of the cluster, or that there is none. Raises MetaUnavailable, UnsupportedVersion."""
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
    """Return the name of a session's node."""
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
    """Return the newest moves of all channels."""
    found = (move for each in channels for move in each.moves)
    return sorted(found, key=lambda move: (move.ended, move.pchannel, move.role), reverse=True)[:limit]


def balance_view(store: MetaStore) -> BalanceView:
    asked = control.read_control_state(store)
    name, service = control.leader(store)
    return BalanceView(leader=name, service=service, frozen=asked.frozen, draining=sorted(asked.drains))
