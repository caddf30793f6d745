"""The cluster's routes: assignments and their watch, nodes, channels with their moves, broadcasts; draining and freezing.

What is asked for is written into the meta store; whoever leads does it in its next round. So every coordinator answers, whoever
leads. What changes something is a PUT or a DELETE: a browser sends neither for a page from elsewhere.
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
    """Routes under /api/v1; each but `broadcasts` raises InvalidSettings (409) where the deployment has no cluster."""
    made = APIRouter(prefix="/api/v1", tags=["cluster"], responses=ERROR_RESPONSES)
    watch = AssignmentWatch(lambda: MetaStoreAssignmentSource(look.store()))

    @made.get("/assignments")
    def assignments() -> AssignmentUpdate:
        """Who serves what, as of `version`; "" is the address of what nobody serves now."""
        return MetaStoreAssignmentSource(look.store()).all()

    @made.get(
        "/assignments/watch", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}}
    )
    async def watch_assignments(
        after: Annotated[int | None, Query(ge=0, description="A version; without it everything comes first.")] = None,
        last_event_id: Annotated[
            int | None, Header(ge=0, description="As `after`: what a browser that reconnects sends.")
        ] = None,
    ) -> StreamingResponse:
        """Events `assignments`: what changed behind a version, or everything (`whole`) where that is not known any more. The id
        of an event is its version: go on from there."""
        from_version = last_event_id if last_event_id is not None else after
        first = await watch.first(from_version)
        return StreamingResponse(
            (sse_event(each) async for each in watch.follow(first)), media_type="text/event-stream"
        )

    @made.get("/nodes")
    def nodes() -> list[NodeRow]:
        """The nodes that are there, and those that are gone and have something still, or are to be emptied."""
        return node_rows(look.store())

    @made.put("/nodes/{name}/drain")
    def drain(name: str, request: Request) -> BalanceView:
        """Have a node emptied, and given nothing, until this is taken back."""
        control.drain(look.store(), name)
        return _done(request, f"drains {name!r}")

    @made.delete("/nodes/{name}/drain")
    def undrain(name: str, request: Request) -> BalanceView:
        """Let a node have PChannels again."""
        control.undrain(look.store(), name)
        return _done(request, f"drains {name!r} no more")

    @made.get("/balance")
    def balance() -> BalanceView:
        """Who leads, and what people asked for."""
        return balance_view(look.store())

    @made.put("/balance/freeze")
    def freeze(request: Request) -> BalanceView:
        """Have nothing moved for balance alone. What has no owner is placed, and what is drained is emptied, all the same."""
        control.freeze(look.store(), frozen=True)
        return _done(request, "freezes the balance")

    @made.delete("/balance/freeze")
    def unfreeze(request: Request) -> BalanceView:
        """Have PChannels moved for balance again."""
        control.freeze(look.store(), frozen=False)
        return _done(request, "freezes the balance no more")

    @made.get("/channels")
    def channels() -> list[ChannelRow]:
        """Each role of each PChannel: state, term, owner, and its newest moves with their causes."""
        return channel_rows(look.store())

    @made.get("/moves")
    def moves(limit: Annotated[int, Query(ge=1, le=MAX_MOVES)] = 50) -> list[MoveRow]:
        """The newest moves of all PChannels, newest first."""
        return newest_moves(channel_rows(look.store()), limit=limit)

    @made.get("/broadcasts")
    def broadcasts(limit: Annotated[int, Query(ge=1, le=MAX_BROADCASTS)] = 50) -> list[BroadcastRow]:
        """Those that are not closed, all of them, and the newest others; newest first. One node has them as well."""
        return broadcast_rows(look.settings, limit=limit)

    def _done(request: Request, words: str) -> BalanceView:
        _log.info("%s %s", request.state.caller.principal.name, words)
        return balance_view(look.store())

    return made
