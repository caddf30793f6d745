"""A process as a node: orders over the wire, what may be committed, and what a session's end means."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import flight

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import (
    InvalidArgument,
    InvalidSettings,
    NodeUnreachable,
    OrderIgnored,
    SessionEnded,
    TablesMoved,
)
from millrace.base.settings import Settings
from millrace.base.settings.place import TablesPlace, placed
from millrace.coord import control
from millrace.coord.channels.record import Owner
from millrace.coord.clock import SystemClock
from millrace.coord.machine.tables_place import PLACE_KEY
from millrace.coord.orders import FlightOrders
from millrace.coord.session import INGEST
from millrace.coord.store_factory import cluster_token, open_cluster_store
from millrace.meta.store import Put
from millrace.node.cluster.member import Member
from millrace.node.cluster.owned_channels import OwnedChannels
from millrace.node.range_loop.ownership import assigned_path, read_assigned


@pytest.fixture
def node(settings: Settings) -> Settings:
    return replace(settings, node="n1", session_seconds=2.0)


@pytest.fixture
def orders(node: Settings) -> Iterator[FlightOrders]:
    with FlightOrders(node, seconds=10.0) as orders:
        yield orders


def registered(settings: Settings) -> Owner:
    """The node's session, as an owner in term 1."""
    with open_cluster_store(settings, SystemClock()) as store:
        assert poll_until(lambda: control.nodes(store), Deadline.after(20), interval=0.05)
        (found,) = control.nodes(store)
    return Owner(found.session, found.address, 1)


def may(owned: OwnedChannels, *pchannels: str) -> set[str]:
    with owned.committing(frozenset(pchannels)) as mine:
        return set(mine)


def test_what_is_assigned_may_be_planned_and_committed_until_it_is_removed(
    node: Settings, orders: FlightOrders
) -> None:
    with Member(node) as member:
        member.start()
        owner = registered(node)
        assert owner.session.startswith("n1@")
        assert may(member.owned, "p0", "p1") == set()
        orders.assign(owner, "p0", INGEST)
        assert read_assigned(assigned_path(node)) == {"p0"}
        assert may(member.owned, "p0", "p1") == {"p0"}
        none = {"rows_per_second": 0.0, "bytes_per_second": 0.0, "lag_seconds": 0.0}
        status = {"session": owner.session, "held": [["p0", INGEST, 1]], "rates": {"p0": none}}
        assert orders.status(owner.address) == status
        member.owned.record_commit("p0", rows=20, bytes=2_000, tick=1 << 18)
        member.owned.record_commit("p1", rows=20, bytes=2_000, tick=1 << 18)  # which is not this node's
        (rates,) = orders.status(owner.address)["rates"].values()
        assert rates["rows_per_second"] == 2.0
        assert rates["lag_seconds"] > 1e6
        orders.remove(owner, "p0", INGEST)
        assert read_assigned(assigned_path(node)) == frozenset()
        assert may(member.owned, "p0") == set()
        with pytest.raises(OrderIgnored):
            orders.assign(owner, "p0", INGEST)
        orders.assign(replace(owner, term=2), "p0", INGEST)
        with pytest.raises(SessionEnded):
            orders.assign(Owner("n1@999", owner.address, 3), "p0", INGEST)
    with pytest.raises(NodeUnreachable):
        orders.status(owner.address)
    assert read_assigned(assigned_path(node)) == frozenset()
    with open_cluster_store(node, SystemClock()) as store:
        assert control.nodes(store) == [], "its session ended with it"


def test_orders_without_the_clusters_token_or_without_sense_are_refused(node: Settings, orders: FlightOrders) -> None:
    with Member(node) as member:
        member.start()
        address = registered(node).address
        with pytest.raises(InvalidArgument):
            orders._call(address, "assign", {"session": "n1@1"})
        with pytest.raises(InvalidArgument):
            orders._call(address, "shutdown", {})
        client = flight.FlightClient(address)
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_action(flight.Action("status", b"{}")))
        client.close()
    assert (node.run_path / "cluster.token").stat().st_mode & 0o777 == 0o600
    assert len(cluster_token(node)) > 16


def test_a_machine_has_one_node_of_a_name(node: Settings) -> None:
    with Member(node), pytest.raises(InvalidSettings, match="another process"):
        Member(node)
    with pytest.raises(InvalidSettings, match="MILLRACE_NODE"):
        Member(replace(node, node=""))


def test_a_node_whose_machine_was_down_while_the_tables_moved_writes_nothing_where_they_were(node: Settings) -> None:
    with open_cluster_store(node, SystemClock()) as store:
        store.commit([Put(PLACE_KEY, TablesPlace("s3://warehouse/tables", ("",)).encode())])
    with pytest.raises(TablesMoved, match="s3://warehouse/tables"), Member(node):
        pass
    with Member(replace(node, tables=placed(node.data_dir, node.tables))):
        pass


class Rig:
    """What a node owns, with a session that holds until it is said otherwise."""

    def __init__(self, folder: Path, drain_seconds: float) -> None:
        self.held = True
        self.owned = OwnedChannels(
            folder / "assigned.json", held=lambda session: self.held, drain_seconds=drain_seconds
        )
        self.owned.open("p0", INGEST, 1, "n1@1")

    def close(self) -> threading.Thread:
        thread = threading.Thread(target=self.owned.close, args=("p0", INGEST, 1), daemon=True)
        thread.start()
        return thread


def test_a_range_that_runs_is_committed_before_its_channel_is_let_go(tmp_path: Path) -> None:
    rig = Rig(tmp_path, drain_seconds=30.0)
    with rig.owned.running(frozenset({"p0"})):
        closing = rig.close()
        assert (
            poll_until(lambda: not read_assigned(tmp_path / "assigned.json"), Deadline.after(10), interval=0.01) is True
        )
        assert may(rig.owned, "p0") == {"p0"}
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
    assert may(rig.owned, "p0") == set()


def test_a_range_that_takes_too_long_is_left_out_and_a_commit_is_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, drain_seconds=0.0)
    with rig.owned.running(frozenset({"p0"})):
        with rig.owned.committing(frozenset({"p0"})):
            closing = rig.close()
            assert poll_until(lambda: not may(rig.owned, "p0"), Deadline.after(10), interval=0.01) is True
            assert closing.is_alive(), "a commit is at work"
        closing.join(10)
        assert not closing.is_alive()


def test_without_a_session_nothing_is_committed_and_nothing_is_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, drain_seconds=30.0)
    rig.held = False
    with rig.owned.running(frozenset({"p0"})):
        assert may(rig.owned, "p0") == set()
        closing = rig.close()
        closing.join(10)
        assert not closing.is_alive()
