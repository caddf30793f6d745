"""A coordinator: it stands by, leads where nobody else does, and then runs the balancer. Several may run: one leads. Without any of
them what is assigned stays so. `millrace.service` is it as a program.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from millrace.base.errors import MillraceError, NotLeader
from millrace.base.settings import Settings
from millrace.catalog.collection import pchannel_of
from millrace.catalog.records import known_collections, pchannel_names
from millrace.coord.balancer.balancer import Balancer, Guards, Stats
from millrace.coord.balancer.policies import policy
from millrace.coord.clock import Clock
from millrace.coord.leadership import Leadership
from millrace.coord.orders import FlightOrders
from millrace.coord.session import moving_roles
from millrace.meta.store import MetaStore

ROUND_SECONDS: Final = 0.25
"""Pause between two rounds of the balancer, and between two looks at who leads."""
ORDERS_AT_ONCE: Final = 16

_log = logging.getLogger(__name__)


def coordinate(
    settings: Settings, store: MetaStore, *, name: str, address: str, stop: threading.Event, clock: Clock
) -> None:
    """Stand by and lead as the coordinator `name`, which serves at `address`, until `stop`."""
    leadership = Leadership(store, clock, name, address=address, seconds=settings.session_seconds)
    campaign = threading.Thread(target=_campaign, args=(leadership, stop), name="leadership", daemon=True)
    campaign.start()
    try:
        with (
            FlightOrders(settings, seconds=settings.session_seconds / 2) as orders,
            ThreadPoolExecutor(ORDERS_AT_ONCE, thread_name_prefix="orders") as pool,
        ):

            def together(calls: Sequence[Callable[[], None]]) -> None:
                list(pool.map(lambda call: call(), calls))

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
    together: Callable[[Sequence[Callable[[], None]]], None],
    stop: threading.Event,
) -> None:
    epoch, seconds = leadership.epoch, settings.session_seconds
    balancer = Balancer(
        leadership,
        clock,
        orders,
        policy("vchannelfair"),
        pchannels=lambda: sorted(pchannel_names(settings.data_dir)),
        together=together,
        stats=CatalogStats(settings),
        guards=Guards(min_interval=settings.balance_interval, refused_for=seconds / 2, patience=1.5 * seconds),
        session_seconds=seconds,
        roles=moving_roles(settings.log),
    )
    while leadership.epoch == epoch:
        try:
            balancer.step()
        except NotLeader:
            return
        except MillraceError as error:
            _log.warning("this round is left to the next one: %s: %s", error.code, error)
        if stop.wait(ROUND_SECONDS):
            return


class CatalogStats:
    """What the catalog says of each PChannel: its VChannels, and whose they are; what it said before while it cannot be read."""

    def __init__(self, settings: Settings) -> None:
        self._data_dir = settings.data_dir
        self._known: Mapping[str, Stats] = {}

    def __call__(self) -> Mapping[str, Stats]:
        try:
            collections = known_collections(self._data_dir)
        except sqlite3.Error as error:
            _log.warning("the catalog cannot be read now: %s", error)
            return self._known
        found: dict[str, list[int]] = {}
        for collection in collections:
            for vchannel in collection.vchannels:
                found.setdefault(pchannel_of(vchannel), []).append(collection.id)
        self._known = {name: Stats(vchannels=len(ids), collections=frozenset(ids)) for name, ids in found.items()}
        return self._known
