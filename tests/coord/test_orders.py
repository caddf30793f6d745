"""Orders to nodes: a connection that failed is not used again."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.base.errors import NodeUnreachable, SessionEnded
from millrace.base.settings import Settings
from millrace.coord import orders
from millrace.coord.channels.record import Owner
from millrace.coord.orders import FlightOrders
from millrace.rpc.link import ConnectionLost


class Node:
    """The connections to one node, which answers on the second one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers = list(answers)
        self.made: list[Node.Link] = []
        monkeypatch.setattr(orders, "Link", lambda record, watchdog: self.connect())

    class Link:
        def __init__(self, node: Node) -> None:
            self.node = node
            self.closed = False

        def act(self, name: str, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
            answer = self.node.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer)

        def close(self) -> None:
            self.closed = True

    def connect(self) -> Link:
        self.made.append(Node.Link(self))
        return self.made[-1]


def test_behind_a_connection_that_failed_the_next_order_goes_over_a_new_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, ConnectionLost("reset"), {"held": []}, {"held": [1]})
    with FlightOrders(settings, seconds=1.0) as made:
        with pytest.raises(NodeUnreachable):
            made.status("grpc://n1:1")
        assert node.made[0].closed
        assert made.status("grpc://n1:1") == {"held": []}
        assert made.status("grpc://n1:1") == {"held": [1]}
        assert len(node.made) == 2, "a connection that stands is used again"
    assert node.made[1].closed


def test_a_refused_order_leaves_the_connection(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, SessionEnded("n1@1 has ended"), {})
    with FlightOrders(settings, seconds=1.0) as made:
        with pytest.raises(SessionEnded):
            made.remove(Owner("n1@1", "grpc://n1:1", 3), "dml_0", "append")
        made.status("grpc://n1:1")
        assert len(node.made) == 1
