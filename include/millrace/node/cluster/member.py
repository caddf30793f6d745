"""A process as a node of the cluster: it keeps a session, executes orders, and knows which channels it owns.

The loops of this process, or the queries of a Spark driver, ask :attr:`Member.owned` before each commit.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.base.file_lock import exclusive_lock
from millrace.base.settings import Settings
from millrace.coord.clock import Clock, SystemClock
from millrace.coord.cluster_level import cluster_level
from millrace.coord.concurrency import ThreadRunner
from millrace.coord.machine.copies import following
from millrace.coord.machine.tables_place import copy_place
from millrace.coord.orders import ASSIGN, STATUS
from millrace.coord.role_manager import RoleManager
from millrace.coord.session import APPEND, INGEST, NodeInfo, Session, moving_roles
from millrace.coord.store_factory import open_cluster_store, require_no_switch
from millrace.node.cluster.append_server import AppendServer
from millrace.node.cluster.order_server import OrderServer, parse_order
from millrace.node.cluster.owned_channels import OwnedChannels
from millrace.node.range_loop.ownership import assigned_path

_log: Final = logging.getLogger(__name__)


class _Roles:
    """Dispatches the opening and closing of a role to its host (implements Opener)."""

    def __init__(self, owned: OwnedChannels, appends: AppendServer | None) -> None:
        self._owned = owned
        self._appends = appends

    def open(self, pchannel: str, role: str, term: int, session: str) -> None:
        if role == INGEST:
            self._owned.open(pchannel, role, term, session)
        elif self._appends is not None:
            self._appends.open(pchannel, session)
        else:
            raise InvalidArgument(f"this node has no role {role!r}")

    def close(self, pchannel: str, role: str, term: int) -> None:
        if role == INGEST:
            self._owned.close(pchannel, role, term)
        elif self._appends is not None:
            self._appends.release(pchannel)


class Member(Closeable):
    """The node `settings.node`. It is in the cluster from :meth:`start` to :meth:`leave`."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        """Create the node and take its name on this machine.

        Raises InvalidSettings if the name is missing or taken by another process of this machine; TablesMoved if the
        tables were moved to another place; MetaUnavailable; UnsupportedVersion.
        """
        if not settings.node:
            raise InvalidSettings("a node of a cluster needs a name: set MILLRACE_NODE, or run `millrace node NAME`")
        clock = clock or SystemClock()
        seconds = settings.session_seconds
        self._stop = threading.Event()
        with ExitStack() as opened:
            settings.node_run_path.mkdir(parents=True, exist_ok=True)
            taken = InvalidSettings(
                f"another process of this machine is the node {settings.node!r}: choose another name"
            )
            opened.enter_context(
                exclusive_lock(settings.node_run_path / "node.lock", deadline=Deadline.after(0), busy=taken)
            )
            store = opened.enter_context(open_cluster_store(settings, clock))
            cluster_level(store)  # a build that does not know it must not take part
            copy_place(settings, store)  # this machine may have been down while the tables moved
            settings.check_place()
            opened.enter_context(following(settings, store))
            server = OrderServer(settings, self._act)
            opened.callback(server.shutdown)
            roles = moving_roles(settings.log)
            appends: AppendServer | None = None
            if APPEND in roles:
                may_open = partial(require_no_switch, store)
                appends = AppendServer(settings, held=self._holds, drain_seconds=seconds / 4, may_open=may_open)
                opened.callback(appends.close)
            client_address = "" if appends is None else appends.address
            info = NodeInfo(settings.node, server.address, roles, client_address)
            self.session = Session(store, clock, info, on_end=self._ended, seconds=seconds)
            self.owned = OwnedChannels(assigned_path(settings), held=self.session.held, drain_seconds=seconds / 4)
            run_all = opened.enter_context(ThreadRunner("roles"))
            self.hosting = RoleManager(self.session, _Roles(self.owned, appends), run_all=run_all)
            self._keeping = threading.Thread(target=self._keep, name="session", daemon=True)
            self._opened = opened.pop_all()
        self._address = server.address

    def start(self) -> None:
        """Register the node and execute orders from now on."""
        _log.info("this node accepts orders at %s", self._address)
        self._keeping.start()

    def _keep(self) -> None:
        while not self._stop.wait(self.session.step()):
            pass

    def _holds(self, session: str) -> bool:
        return self.session.held(session)

    def _ended(self) -> None:
        if not self._stop.is_set():
            _log.warning("the session of this node has ended: it owns nothing until it is assigned channels again")
        self.hosting.end()

    def _act(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        if name == STATUS:
            held = [[each.pchannel, each.role, each.term] for each in self.hosting.held_roles()]
            rates = {name: asdict(rate) for name, rate in self.owned.rates().items()}
            return {"session": self.session.name, "held": held, "rates": rates}
        session, pchannel, role, term = parse_order(request)
        if name == ASSIGN:
            self.hosting.assign(session, pchannel, role, term)
        else:
            self.hosting.remove(session, pchannel, role, term)
        _log.info("%s %s (%s) in term %d", name, pchannel, role, term)
        return {}

    def leave(self) -> None:
        """End the session so that the coordinator reassigns this node's channels at once. Stop commits first.
        Idempotent.
        """
        self._stop.set()
        if self._keeping.ident is not None:
            self._keeping.join()
        self.session.close()

    def close(self) -> None:
        self.leave()
        self._opened.close()
