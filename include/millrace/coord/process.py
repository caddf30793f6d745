"""Runs a coordinator: it campaigns for leadership and, as the leader, runs the balancer.

Several coordinators may run; one leads. Without any, assignments stay as they are. `millrace.service` is the program.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from millrace.base.errors import InvalidSettings, MillraceError, NotLeader
from millrace.base.settings import Settings
from millrace.base.settings.live import LiveSettings
from millrace.catalog.sqlite_file import catalog_path, open_read_only, pchannel_names, select_vchannels
from millrace.coord.balancer.balancer import Balancer, ChannelStats, RebalanceLimits
from millrace.coord.balancer.policies import policy_of
from millrace.coord.clock import Clock
from millrace.coord.cluster_level import cluster_level
from millrace.coord.concurrency import RunAll, ThreadRunner
from millrace.coord.leadership import Leadership
from millrace.coord.machine.copies import following
from millrace.coord.orders import FlightOrders
from millrace.coord.session import moving_roles
from millrace.message.ids import pchannel_of
from millrace.meta.store import MetaStore

ROUND_SECONDS: Final = 0.25
"""Seconds between two rounds of the balancer, and between two checks of leadership."""
STATS_SECONDS: Final = 1.0
"""Seconds between two polls of node statistics."""

_log = logging.getLogger(__name__)


class NodeStatusSource(Protocol):
    """Asks nodes for their status (FlightOrders)."""

    def status(self, address: str) -> dict[str, Any]: ...


def run_coordinator(
    settings: Settings, store: MetaStore, *, name: str, address: str, stop: threading.Event, clock: Clock
) -> None:
    """Run the coordinator `name`, which serves at `address`, until `stop` is set."""
    cluster_level(store)  # a build that does not know it must not take part
    leadership = Leadership(store, clock, name, address=address, seconds=settings.session_seconds)
    campaign = threading.Thread(target=_campaign, args=(leadership, stop), name="leadership", daemon=True)
    campaign.start()
    try:
        with (
            FlightOrders(settings, seconds=settings.session_seconds / 2) as orders,
            ThreadRunner("orders") as run_all,
            following(settings, store),
        ):
            while not stop.wait(ROUND_SECONDS):
                if leadership.epoch:
                    _log.info("%s leads", name)
                    _lead(settings, leadership, clock, orders, run_all, stop)
                    _log.info("%s no longer leads", name)
    finally:
        stop.set()
        campaign.join()
        leadership.resign()


def _campaign(leadership: Leadership, stop: threading.Event) -> None:
    while not stop.wait(leadership.step()):
        pass


def _lead(
    settings: Settings,
    leadership: Leadership,
    clock: Clock,
    orders: FlightOrders,
    run_all: RunAll,
    stop: threading.Event,
) -> None:
    epoch, seconds = leadership.epoch, settings.session_seconds
    live = LiveSettings(settings)
    stats = ClusterStats(CatalogStats(settings), orders)
    balancer = Balancer(
        leadership,
        clock,
        orders,
        policy_of(settings),
        pchannels=lambda: sorted(pchannel_names(settings.data_dir)),
        run_all=run_all,
        stats=stats,
        limits=rebalance_limits(settings),
        session_seconds=seconds,
        roles=moving_roles(settings.log),
    )
    asking = threading.Thread(
        target=_ask_nodes, args=(leadership, epoch, balancer, stats, run_all, stop), name="statistics", daemon=True
    )
    asking.start()
    try:
        while leadership.epoch == epoch:
            try:
                follow_settings(balancer, live)
                balancer.step()
            except NotLeader:
                return
            except MillraceError as error:
                _log.warning("a round of the balancer failed and will be repeated: %s: %s", error.code, error)
            if stop.wait(ROUND_SECONDS):
                return
    finally:
        asking.join()


def follow_settings(balancer: Balancer, live: LiveSettings) -> None:
    """Take over the limits and the policy of changed settings.

    A policy that is not installed here leaves the former one.
    """
    found = live.current()
    if found is balancer.settings:
        return
    balancer.settings = found
    balancer.limits = rebalance_limits(found)
    try:
        balancer.use_policy(policy_of(found))
    except InvalidSettings as error:
        _log.warning("the balancer continues with its former policy: %s", error)


def rebalance_limits(settings: Settings) -> RebalanceLimits:
    """Return the balancer's limits of the settings."""
    return RebalanceLimits(
        min_interval=settings.balance_interval,
        max_recovery_lag=settings.balance_lag,
        refusal_seconds=settings.session_seconds / 2,
        eviction_seconds=1.5 * settings.session_seconds,
    )


def _ask_nodes(
    leadership: Leadership,
    epoch: int,
    balancer: Balancer,
    stats: ClusterStats,
    run_all: RunAll,
    stop: threading.Event,
) -> None:
    """Poll node statistics in a thread of its own, so that an unresponsive node does not delay a round."""
    while leadership.epoch == epoch and not stop.wait(STATS_SECONDS):
        stats.poll([info.address for info in list(balancer.nodes.values())], run_all)


class ClusterStats:
    """Combine the statistics of the catalog and of the nodes, by PChannel."""

    def __init__(self, catalog: Callable[[], Mapping[str, ChannelStats]], orders: NodeStatusSource) -> None:
        self._catalog = catalog
        self._orders = orders
        self._rates: Mapping[str, Mapping[str, float]] = {}

    def __call__(self) -> Mapping[str, ChannelStats]:
        known, rates = self._catalog(), self._rates
        return {
            name: replace(
                known.get(name, ChannelStats()),
                rows_per_second=rates.get(name, {}).get("rows_per_second", 0.0),
                bytes_per_second=rates.get(name, {}).get("bytes_per_second", 0.0),
                recovery_lag=rates.get(name, {}).get("lag_seconds", 0.0),
            )
            for name in known.keys() | rates.keys()
        }

    def poll(self, addresses: Sequence[str], run_all: RunAll) -> Mapping[str, Mapping[str, float]]:
        """Ask the nodes at `addresses` for their ingest rates; return them by PChannel.

        A node that does not answer counts as 0.
        """
        found: dict[str, Mapping[str, float]] = {}

        def one(address: str) -> None:
            try:
                found.update(self._orders.status(address).get("rates", {}))
            except MillraceError as error:
                _log.debug("no statistics from %s: %s", address, error)

        run_all([partial(one, address) for address in addresses])
        self._rates = found
        return found


class CatalogStats:
    """Return the number of VChannels and the collections of each PChannel, read again only after the catalog changed.

    While the catalog cannot be read, the previous answer is returned.
    """

    def __init__(self, settings: Settings) -> None:
        self._data_dir = settings.data_dir
        self._known: Mapping[str, ChannelStats] = {}
        self._db: sqlite3.Connection | None = None
        self._version: tuple[int, ...] = ()

    def __call__(self) -> Mapping[str, ChannelStats]:
        try:
            self._refresh()
        except (sqlite3.Error, OSError) as error:
            _log.warning("cannot read the catalog: %s", error)
        return self._known

    def _refresh(self) -> None:
        path = catalog_path(self._data_dir)
        inode = path.stat().st_ino if path.exists() else 0
        if self._db is not None and self._version[:1] != (inode,):  # another file, from a restore
            self._db.close()
            self._db = None
        if self._db is None:
            self._db, self._version = open_read_only(self._data_dir), ()
        if self._db is None:
            return
        version = (inode, *self._db.execute("pragma data_version").fetchone())
        if version == self._version:
            return
        found: dict[str, list[int]] = {}
        for number, vchannels in select_vchannels(self._db):
            for vchannel in vchannels:
                found.setdefault(pchannel_of(vchannel), []).append(number)
        self._known = {
            name: ChannelStats(vchannels=len(ids), collections=frozenset(ids)) for name, ids in found.items()
        }
        self._version = version
