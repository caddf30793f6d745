"""A coordinator: it stands by, leads where nobody else does, and then runs the balancer. Several may run: one leads. Without any of
them what is assigned stays so. `millrace.service` is it as a program.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from millrace.base.errors import MillraceError, NotLeader
from millrace.base.settings import Settings
from millrace.catalog.collection import pchannel_of
from millrace.catalog.sqlite_file import pchannel_names, read_collections
from millrace.coord.balancer.balancer import Balancer, ChannelStats, RebalanceLimits
from millrace.coord.balancer.policies import find_policy
from millrace.coord.clock import Clock
from millrace.coord.concurrency import RunAll, ThreadRunner
from millrace.coord.leadership import Leadership
from millrace.coord.orders import FlightOrders
from millrace.coord.session import moving_roles
from millrace.meta.store import MetaStore

ROUND_SECONDS: Final = 0.25
"""Pause between two rounds of the balancer, and between two looks at who leads."""
STATS_SECONDS: Final = 1.0
"""Pause between two looks at what nodes say of what they have."""

_log = logging.getLogger(__name__)


class NodeStatusSource(Protocol):
    """What nodes are asked by (FlightOrders)."""

    def status(self, address: str) -> dict[str, Any]: ...


def run_coordinator(
    settings: Settings, store: MetaStore, *, name: str, address: str, stop: threading.Event, clock: Clock
) -> None:
    """Stand by and lead as the coordinator `name`, which serves at `address`, until `stop`."""
    leadership = Leadership(store, clock, name, address=address, seconds=settings.session_seconds)
    campaign = threading.Thread(target=_campaign, args=(leadership, stop), name="leadership", daemon=True)
    campaign.start()
    try:
        with (
            FlightOrders(settings, seconds=settings.session_seconds / 2) as orders,
            ThreadRunner("orders") as together,
        ):
            while not stop.wait(ROUND_SECONDS):
                if leadership.epoch:
                    _log.info("%s leads", name)
                    _lead(settings, leadership, clock, orders, together, stop)
                    _log.info("%s leads no more", name)
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
    together: RunAll,
    stop: threading.Event,
) -> None:
    epoch, seconds = leadership.epoch, settings.session_seconds
    stats = ClusterStats(CatalogStats(settings), orders)
    balancer = Balancer(
        leadership,
        clock,
        orders,
        find_policy("vchannelfair"),
        pchannels=lambda: sorted(pchannel_names(settings.data_dir)),
        run_all=together,
        stats=stats,
        limits=RebalanceLimits(
            min_interval=settings.balance_interval,
            max_recovery_lag=settings.balance_lag,
            refusal_seconds=seconds / 2,
            eviction_seconds=1.5 * seconds,
        ),
        session_seconds=seconds,
        roles=moving_roles(settings.log),
    )
    asking = threading.Thread(
        target=_ask_nodes, args=(leadership, epoch, balancer, stats, together, stop), name="statistics", daemon=True
    )
    asking.start()
    try:
        while leadership.epoch == epoch:
            try:
                balancer.step()
            except NotLeader:
                return
            except MillraceError as error:
                _log.warning("this round is left to the next one: %s: %s", error.code, error)
            if stop.wait(ROUND_SECONDS):
                return
    finally:
        asking.join()


def _ask_nodes(
    leadership: Leadership,
    epoch: int,
    balancer: Balancer,
    stats: ClusterStats,
    together: RunAll,
    stop: threading.Event,
) -> None:
    """Beside the rounds: a node that does not answer is no reason to wait with them."""
    while leadership.epoch == epoch and not stop.wait(STATS_SECONDS):
        stats.poll([info.address for info in list(balancer.nodes.values())], together)


class ClusterStats:
    """What the catalog and the nodes say of each PChannel."""

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

    def poll(self, addresses: Sequence[str], together: RunAll) -> Mapping[str, Mapping[str, float]]:
        """Ask the nodes at `addresses` how what they ingest goes; what one does not answer is taken to be 0. By PChannel."""
        found: dict[str, Mapping[str, float]] = {}

        def one(address: str) -> None:
            try:
                found.update(self._orders.status(address).get("rates", {}))
            except MillraceError as error:
                _log.debug("%s does not say how it goes: %s", address, error)

        together([partial(one, address) for address in addresses])
        self._rates = found
        return found


class CatalogStats:
    """What the catalog says of each PChannel: its VChannels, and whose they are; what it said before while it cannot be read."""

    def __init__(self, settings: Settings) -> None:
        self._data_dir = settings.data_dir
        self._known: Mapping[str, ChannelStats] = {}

    def __call__(self) -> Mapping[str, ChannelStats]:
        try:
            collections = read_collections(self._data_dir)
        except sqlite3.Error as error:
            _log.warning("the catalog cannot be read now: %s", error)
            return self._known
        found: dict[str, list[int]] = {}
        for collection in collections:
            for vchannel in collection.vchannels:
                found.setdefault(pchannel_of(vchannel), []).append(collection.id)
        self._known = {
            name: ChannelStats(vchannels=len(ids), collections=frozenset(ids)) for name, ids in found.items()
        }
        return self._known
