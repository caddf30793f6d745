"""``millrace coord``, ``node``, ``nodes``, ``channels``, ``broadcasts``, ``balance``, ``drain``: several nodes that
share one deployment (docs/coordinator.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, UpgradeRefused
from millrace.base.extras import require_extras
from millrace.commands.parts.command_line import (
    INSPECT_PANEL,
    OPERATE_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    exec_python,
    iso_time,
    print_facts,
    print_rows,
    root,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.meta.store import MetaStore

_POLL = 0.1
_ANSWER = 2.0
"""Seconds that a node may take to say how it goes."""
_ASKED_AT_ONCE = 16
_RATES: dict[str, float | None] = dict.fromkeys(("rows_per_second", "bytes_per_second", "lag_seconds"))

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]


class OnOff(StrEnum):
    ON = "on"
    OFF = "off"


@contextmanager
def _store(context: CommandContext) -> Iterator[MetaStore]:
    from millrace.coord.clock import SystemClock
    from millrace.coord.store_factory import open_cluster_store, require_cluster

    settings = context.settings
    require_cluster(settings)
    with open_cluster_store(settings, SystemClock()) as store:
        yield store


@root.command(rich_help_panel=OPERATE_PANEL)
def coord(
    context: CommandContext,
    name: Annotated[str, typer.Option("--name", help="Name of the coordinator. Default: host and process.")] = "",
) -> None:
    """Run a coordinator in the foreground. It assigns PChannels to nodes. Several may run; one of them leads.

    Example: `millrace coord --name c1`
    """
    require_extras("coord")
    exec_python(["-m", "millrace.service", *(["--name", name] if name else [])], context.settings)


@root.command(rich_help_panel=OPERATE_PANEL)
def node(
    context: CommandContext,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the node in the cluster.")],
    spark: Annotated[
        bool, typer.Option("--spark", help="Run the streaming job on Spark instead of in this process.")
    ] = False,
) -> None:
    """Run a cluster node in the foreground. It ingests and flushes the PChannels that the coordinator assigns to it.

    Without a cluster, `millrace jobs run` handles all PChannels.

    Example: `millrace node n1`
    """
    from millrace.runtime.launch.command import jobs_folder

    require_extras("coord")
    settings = replace(context.settings, node=name)
    alone = ["-m", "millrace.node.cluster"]
    exec_python([str(jobs_folder() / "streaming_node.py"), "--with-flusher"] if spark else alone, settings)


@root.command(rich_help_panel=INSPECT_PANEL)
def nodes(context: JsonContext) -> None:
    """Show the nodes of a cluster: addresses, assigned PChannels, and which nodes are draining.

    Example: `millrace nodes`
    """
    from millrace.coord import control

    with _store(context) as store:
        rows = [
            {
                "name": each.name,
                "state": each.state,
                "session": each.session or None,
                "address": each.address or None,
                "pchannels": len(each.owns),
                "owns": list(each.owns),
            }
            for each in control.nodes(store)
        ]
    columns = ("name", "state", "pchannels", "owns", "session", "address")
    print_rows(
        rows, columns=columns, as_json=context.as_json, empty="No node is registered: `millrace node NAME` starts one."
    )


def _rates(settings: Settings, addresses: list[str]) -> dict[str, dict[str, float | None]]:
    """Return the rates of each PChannel as its node reports them. Nodes that do not answer are left out."""
    from concurrent.futures import ThreadPoolExecutor

    from millrace.coord.orders import FlightOrders
    from millrace.coord.process import ClusterStats

    with FlightOrders(settings, seconds=_ANSWER) as orders, ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:

        def run_all(calls: Sequence[Callable[[], None]]) -> None:
            list(pool.map(lambda call: call(), calls))

        asked = ClusterStats(dict, orders).poll(sorted(set(addresses)), run_all)
    return {name: dict(said) for name, said in asked.items()}


@root.command(rich_help_panel=INSPECT_PANEL)
def channels(context: JsonContext) -> None:
    """Show the owner, role, term and cause of each PChannel's assignment, waiting DDL broadcasts, and ingest rates.

    Example: `millrace channels`
    """
    from millrace.coord import control
    from millrace.coord.session import INGEST
    from millrace.observe.broadcasts import waiting_broadcasts

    waits = waiting_broadcasts(context.settings)
    with _store(context) as store:
        records = control.channels(store)
        rates = _rates(context.settings, [each.owner.address for each in records if each.owner is not None])
        rows = [
            {
                "pchannel": each.pchannel,
                "role": each.role,
                "state": str(each.state),
                "term": each.term,
                "node": None if each.owner is None else each.owner.session.rpartition("@")[0],
                "session": None if each.owner is None else each.owner.session,
                "cause": each.cause or None,
                "not_let_go": [owner.session for owner in each.history],
                "broadcasts": waits[each.pchannel],
                **(
                    _RATES
                    if each.role != INGEST
                    else {name: rates.get(each.pchannel, _RATES).get(name) for name in _RATES}
                ),
            }
            for each in records
        ]
    columns = ("pchannel", "role", "state", "term", "node", "cause", *_RATES, "not_let_go", "broadcasts")
    print_rows(
        rows, columns=columns, as_json=context.as_json, empty="Nothing is assigned yet: `millrace coord` does that."
    )


@root.command(rich_help_panel=INSPECT_PANEL)
def broadcasts(
    context: JsonContext,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Most broadcasts to show, besides open ones.")] = 20,
    open_only: Annotated[bool, typer.Option("--open", help="Show open broadcasts alone.")] = False,
) -> None:
    """Show broadcasts, DDL and messages: who asked for them, which VChannels have them, and what they wait for.

    Example: `millrace broadcasts --open`
    """
    from millrace.observe.broadcasts import broadcast_rows

    found = broadcast_rows(context.settings, limit=limit, closed=not open_only)
    rows = [
        {
            "id": each.id,
            "kind": each.kind,
            "collection": each.collection,
            "state": str(each.state),
            "principal": each.principal or None,
            "at": iso_time(round(each.at * 1000)) if each.at else None,
            "acked": f"{sum(tick is not None for tick in each.targets.values())} of {len(each.targets)}",
            "reason": each.words or None,
            **({"request": each.request, "keys": each.keys, "targets": each.targets} if context.as_json else {}),
        }
        for each in found
    ]
    columns = ("id", "kind", "collection", "state", "principal", "at", "acked", "reason")
    empty = "No broadcast is open." if open_only else "No broadcasts yet."
    print_rows(rows, columns=columns, as_json=context.as_json, empty=empty)


@root.command(rich_help_panel=OPERATE_PANEL)
def balance(
    context: JsonContext,
    switch: Annotated[OnOff | None, typer.Argument(metavar="[on|off]", help="Without it: show the state.")] = None,
) -> None:
    """Show the leader and the state of the balancer; `off` stops moves for balance, `on` allows them again.

    Unassigned PChannels are assigned and drained nodes are emptied in either state.

    Example: `millrace balance off`
    """
    from millrace.coord import control

    with _store(context) as store:
        if switch is not None:
            control.freeze(store, frozen=switch is OnOff.OFF)
        asked = control.read_control_state(store)
        leader, service = control.leader(store)
        facts = {
            "leader": leader or None,
            "service": service or None,
            "balance": OnOff.OFF if asked.frozen else OnOff.ON,
            "draining": sorted(asked.drains),
            "pchannels": {each.name: len(each.owns) for each in control.nodes(store)},
        }
    print_facts(facts, as_json=context.as_json)


@root.command(rich_help_panel=OPERATE_PANEL)
def drain(
    context: CommandContext,
    name: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="Allow assignments to the node again.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait this long for the node to own nothing.")
    ] = 0.0,
) -> None:
    """Move all PChannels of a node to others and assign none to it until `--undo`. The node can then be stopped.

    Example: `millrace drain n1 --wait 60`

    Example: `millrace drain n1 --undo`
    """
    from millrace.coord import control

    with _store(context) as store:
        if undo:
            control.undrain(store, name)
            typer.echo(f"{name} can be assigned PChannels again.")
            return
        control.drain(store, name)
        end = Deadline.after(wait)
        while left := control.owned_by(store, name):
            if not end.pause(_POLL):
                break
    if left and wait:
        raise DeadlineExceeded(f"{name} still has {', '.join(left)} after {wait:g} s; the node is still being drained")
    typer.echo(f"{name} is being emptied: it has {', '.join(left)}." if left else f"{name} has nothing any more.")


upgrade_app = command_group("upgrade", OPERATE_PANEL, "Show and finish a rolling upgrade of a cluster.")


@upgrade_app.command("status")
def upgrade_status(context: JsonContext) -> None:
    """Show the cluster's level, the newest level that this build knows, and the nodes that lag behind.

    Example: `millrace upgrade status`
    """
    from millrace.coord import cluster_level

    with _store(context) as store:
        found = cluster_level.upgrade_status(store)
    facts = {"level": found.level, "newest": found.newest, "nodes": found.nodes, "lagging": found.lagging}
    off = [each for level, names in cluster_level.FEATURES.items() if level > found.level for each in names]
    print_facts({**facts, "off": off}, as_json=context.as_json)


@upgrade_app.command("finish")
def upgrade_finish(context: JsonContext) -> None:
    """Turn on what this build adds, once every node runs it. Earlier builds cannot take part afterwards.

    Opens a new term of each PChannel, which producers fetch by themselves.

    Example: `millrace upgrade finish`
    """
    from millrace.client.database import connect
    from millrace.coord import cluster_level

    with _store(context) as store:
        before = cluster_level.upgrade_status(store).level
        found = cluster_level.finish_upgrade(store)
    opened: list[str] = []
    with connect(settings=context.settings) as database:
        for each in database.catalog.pchannels():
            if database.connection.describe(each.name)["chain_version"] < cluster_level.CHAIN_OF[found.newest]:
                database.catalog.open_term(each.name)
                opened.append(each.name)
                if database.connection.describe(each.name)["chain_version"] < cluster_level.CHAIN_OF[found.newest]:
                    raise UpgradeRefused(
                        "the log server runs an earlier build: restart it with this one, and run this again"
                    )
    print_facts({"before": before, "level": found.newest, "new_terms": opened}, as_json=context.as_json)
