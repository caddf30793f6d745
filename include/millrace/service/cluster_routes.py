"""Routes of the cluster: assignments and their watch, nodes, channels, moves, broadcasts; draining, freezing.

Requests are written into the meta store, and the leader executes them in its next round. So every coordinator can
answer, not only the leader. Changes are PUT or DELETE, which a browser does not send for a page of another site.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from millrace.access.grants import Role
from millrace.access.permissions import Requirement, Scope
from millrace.coord import control
from millrace.coord.assignment_source import MetaStoreAssignmentSource
from millrace.observe.broadcasts import MAX_BROADCASTS, BroadcastRow, broadcast_rows
from millrace.observe.cluster import (
    MAX_MOVES,
    BalanceView,
    ChannelRow,
    ClusterReader,
    MoveRow,
    NodeRow,
    balance_view,
    channel_rows,
    newest_moves,
    node_rows,
)
from millrace.rpc.assignments import AssignmentUpdate
from millrace.service.assignment_watch import AssignmentWatch, sse_event
from millrace.service.error_responses import ERROR_RESPONSES

_READ: Final = (Role.READ, Role.PRODUCE)
_OPERATE: Final = (Role.OPERATE,)

CALLS: Final[Mapping[str, Requirement]] = {
    "assignments": Requirement(_READ, Scope.ANYTHING, description="who serves which role of which PChannel"),
    "watch_assignments": Requirement(
        _READ, Scope.ANYTHING, description="the same as it changes, by server-sent events"
    ),
    "nodes": Requirement((Role.READ,), Scope.EVERYTHING, description="the nodes"),
    "channels": Requirement((Role.READ,), Scope.EVERYTHING, description="each role of each PChannel, with its moves"),
    "moves": Requirement((Role.READ,), Scope.EVERYTHING, description="the newest moves, with their causes"),
    "balance": Requirement((Role.READ,), Scope.EVERYTHING, description="who leads, and what is frozen or drained"),
    "broadcasts": Requirement((Role.READ,), Scope.EVERYTHING, description="broadcasts, and who has their message"),
    "drain": Requirement(_OPERATE, Scope.EVERYTHING, description="empty a node"),
    "undrain": Requirement(_OPERATE, Scope.EVERYTHING, description="give a node PChannels again"),
    "freeze": Requirement(_OPERATE, Scope.EVERYTHING, description="move nothing for balance alone"),
    "unfreeze": Requirement(_OPERATE, Scope.EVERYTHING, description="move for balance again"),
}

_log: Final = logging.getLogger(__name__)


def router(look: ClusterReader) -> APIRouter:
    """Return the routes under /api/v1.

    Each but `broadcasts` raises InvalidSettings (409) if the deployment has no cluster.
    """
    made = APIRouter(prefix="/api/v1", tags=["cluster"], responses=ERROR_RESPONSES)
    watch = AssignmentWatch(lambda: MetaStoreAssignmentSource(look.store()))

    @made.get("/assignments")
    def assignments() -> AssignmentUpdate:
        """Return the assignments as of `version`; the address of a role that no node serves is ""."""
        return MetaStoreAssignmentSource(look.store()).all()

    @made.get(
        "/assignments/watch", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}}
    )
    async def watch_assignments(
        after: Annotated[
            int | None, Query(ge=0, description="A version; without it, the first event has everything.")
        ] = None,
        last_event_id: Annotated[
            int | None, Header(ge=0, description="Like `after`; a browser sends it when it reconnects.")
        ] = None,
    ) -> StreamingResponse:
        """Stream events `assignments`: the changes after a version, or everything (`whole`) if unknown.

        The id of an event is its version, from which a client continues.
        """
        from_version = last_event_id if last_event_id is not None else after
        first = await watch.first(from_version)
        return StreamingResponse(
            (sse_event(each) async for each in watch.follow(first)), media_type="text/event-stream"
        )

    @made.get("/nodes")
    def nodes() -> list[NodeRow]:
        """Return the nodes: those that run, and those that are gone but still own something or are to be drained."""
        return node_rows(look.store())

    @made.put("/nodes/{name}/drain")
    def drain(name: str, request: Request) -> BalanceView:
        """Drain a node: move its PChannels away and assign it none until this is undone."""
        control.drain(look.store(), name)
        return _done(request, f"drains {name!r}")

    @made.delete("/nodes/{name}/drain")
    def undrain(name: str, request: Request) -> BalanceView:
        """Allow a node to own PChannels again."""
        control.undrain(look.store(), name)
        return _done(request, f"stops draining {name!r}")

    @made.get("/balance")
    def balance() -> BalanceView:
        """Return the leader, and what operators have requested."""
        return balance_view(look.store())

    @made.put("/balance/freeze")
    def freeze(request: Request) -> BalanceView:
        """Move nothing for balance alone. PChannels without an owner are still assigned, and drained nodes emptied."""
        control.freeze(look.store(), frozen=True)
        return _done(request, "freezes the balance")

    @made.delete("/balance/freeze")
    def unfreeze(request: Request) -> BalanceView:
        """Move PChannels for balance again."""
        control.freeze(look.store(), frozen=False)
        return _done(request, "unfreezes the balance")

    @made.get("/channels")
    def channels() -> list[ChannelRow]:
        """Return each role of each PChannel: state, term, owner, and its newest moves with their causes."""
        return channel_rows(look.store())

    @made.get("/moves")
    def moves(limit: Annotated[int, Query(ge=1, le=MAX_MOVES)] = 50) -> list[MoveRow]:
        """Return the newest moves of all PChannels, newest first."""
        return newest_moves(channel_rows(look.store()), limit=limit)

    @made.get("/broadcasts")
    def broadcasts(limit: Annotated[int, Query(ge=1, le=MAX_BROADCASTS)] = 50) -> list[BroadcastRow]:
        """Return all open broadcasts and the newest others, newest first. A single node has them as well."""
        return broadcast_rows(look.settings, limit=limit)

    def _done(request: Request, words: str) -> BalanceView:
        _log.info("%s %s", request.state.caller.principal.name, words)
        return balance_view(look.store())

    return made
