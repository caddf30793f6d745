"""Routes of the read model as JSON, one per question, and the metrics. All are GET."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from millrace.access.grants import Role
from millrace.access.permissions import Requirement, Scope
from millrace.observe.consumer_groups import GroupView
from millrace.observe.flows import StreamsView
from millrace.observe.models import (
    CheckpointsView,
    CollectionRow,
    CollectionView,
    FilePage,
    HistoryView,
    MaintenanceView,
    MessageSearch,
    MessageView,
    Overview,
    QualityView,
    RejectionSearch,
    RowSample,
    SegmentPage,
    TransactionSearch,
)
from millrace.observe.observer import Observer
from millrace.service.error_responses import ERROR_RESPONSES
from millrace.service.search_parameters import message_query, rejection_query, transaction_query

INT64 = (1 << 63) - 1
Limit = Annotated[int, Query(ge=1, le=200, description="Items of a page.")]
Offset = Annotated[int, Query(ge=0, le=1 << 40, description="Items to skip.")]
Before = Annotated[str, Query(max_length=200, description="`next` of the page before this one.")]
Text = Annotated[str, Query(max_length=200)]

CALLS: Final[Mapping[str, Requirement]] = {
    name: Requirement((Role.READ,), Scope.EVERYTHING, description=words)
    for name, words in {
        "overview": "the state of the whole",
        "history": "throughput, lag and freshness over a window",
        "collections": "the collections, by pages",
        "collection": "one collection: schema, partitions, VChannels, sizes",
        "segments": "a collection's segments",
        "files": "a collection's files",
        "sample": "some of a collection's newest rows",
        "rejections": "rejected messages",
        "messages": "accepted messages, by principal, collection, producer, type or time",
        "transactions": "transactions",
        "message": "a message of the WAL, decoded",
        "checkpoints": "checkpoints, and what truncation could free",
        "maintenance": "the tables' health and the operations",
        "streams": "declared streams, what feeds what, and how each is doing",
        "quality": "results of the quality checks",
        "consumer_groups": "consumer groups: members, their channels, and lag",
        "metrics": "all metrics (the token of `MILLRACE_METRICS_TOKEN` opens them too)",
    }.items()
}


def router(observer: Observer) -> APIRouter:
    """Return the routes under /api/v1."""
    made = APIRouter(prefix="/api/v1", tags=["millrace"], responses=ERROR_RESPONSES)

    @made.get("/overview")
    def overview() -> Overview:
        """Return the overall state: jobs, PChannels, totals."""
        return observer.overview()

    @made.get("/history")
    def history(window: Text = "15m") -> HistoryView:
        """Return throughput, lag and freshness over a window: 15m, 1h, 6h or 24h."""
        return observer.history(window)

    @made.get("/collections")
    def collections(
        request: Request,
        response: Response,
        dropped: bool = False,
        search: Text = "",
        offset: Offset = 0,
        limit: Limit = 50,
    ) -> list[CollectionRow]:
        """Return a page of the collections by name: those whose name contains `search`; with `dropped`, also dropped
        ones.

        The header `X-Total-Count` has their number on all pages, and `Link` the next page, if there is one.
        """
        page = observer.collections(dropped=dropped, search=search, offset=offset, limit=limit)
        response.headers["X-Total-Count"] = str(page.total)
        if offset + limit < page.total:
            following = request.url.include_query_params(offset=offset + limit, limit=limit)
            response.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
        return page.items

    @made.get("/collections/{name}")
    def collection(name: str) -> CollectionView:
        """Return a collection by name, alias or id: schema, partitions, VChannels, sizes."""
        return observer.collection(name)

    @made.get("/collections/{name}/segments")
    def segments(name: str, state: Text = "", offset: Offset = 0, limit: Limit = 50) -> SegmentPage:
        """Return segments, newest first: of one state (growing, flushed, dropped) or all."""
        return observer.segments(name, state=state, offset=offset, limit=limit)

    @made.get("/collections/{name}/files")
    def files(
        name: str,
        deletes: bool = False,
        order: Literal["tick", "bytes", "rows"] = "tick",
        offset: Offset = 0,
        limit: Limit = 50,
    ) -> FilePage:
        """Return files of the rows table (or of the deletes table)."""
        return observer.files(name, deletes=deletes, order=order, offset=offset, limit=limit)

    @made.get("/collections/{name}/sample")
    def sample(
        name: str,
        at: Annotated[int | None, Query(ge=0, le=INT64, description="A time tick; without it the newest.")] = None,
        limit: Limit = 20,
    ) -> RowSample:
        """Return some of the newest rows that are visible at a time tick, with deletes applied."""
        return observer.sample(name, at=at, limit=limit)

    @made.get("/messages")
    def messages(
        query: Annotated[Any, Depends(message_query)], before: Before = "", limit: Limit = 50
    ) -> MessageSearch:
        """Return accepted messages, newest first: of a principal, a collection, a producer, a type or a time."""
        return observer.messages(query, limit=limit, before=before)

    @made.get("/rejections")
    def rejections(
        query: Annotated[Any, Depends(rejection_query)], before: Before = "", limit: Limit = 50
    ) -> RejectionSearch:
        """Return rejected messages, newest first."""
        return observer.rejections(query, limit=limit, before=before)

    @made.get("/transactions")
    def transactions(
        query: Annotated[Any, Depends(transaction_query)], before: Before = "", limit: Limit = 50
    ) -> TransactionSearch:
        """Return open transactions, and ended ones, newest first."""
        return observer.transactions(query, limit=limit, before=before)

    @made.get("/messages/{pchannel}/{message_id}")
    def message(pchannel: str, message_id: str) -> MessageView:
        """Return a message or rejection of the WAL, decoded."""
        return observer.message(pchannel, message_id)

    @made.get("/checkpoints")
    def checkpoints() -> CheckpointsView:
        """Return the checkpoints of each PChannel, and what truncation could free."""
        return observer.checkpoints()

    @made.get("/maintenance")
    def maintenance(job: Text = "", limit: Limit = 50) -> MaintenanceView:
        """Return the tables' health, and current and past operations (of one job)."""
        return observer.maintenance(job=job, limit=limit)

    @made.get("/streams")
    def streams() -> StreamsView:
        """Return declared streams and the tables between them: state, rows, lag, watermark and late rows of each."""
        return observer.streams()

    @made.get("/consumer-groups")
    def consumer_groups() -> list[GroupView]:
        """Return the consumer groups: members, the channels that each has, positions and lag."""
        return observer.consumer_groups()

    @made.get("/quality")
    def quality(limit: Limit = 100) -> QualityView:
        """Return results of the data-quality checks, newest first, and what they block."""
        return observer.quality(limit=limit)

    return made


def metrics_router(render: Callable[[], bytes]) -> APIRouter:
    """Return the route of the metrics that `render` returns."""
    made = APIRouter(tags=["metrics"])

    @made.get("/metrics", response_class=Response, responses=ERROR_RESPONSES)
    def metrics() -> Response:
        """Return all metrics in the Prometheus text format."""
        return Response(render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return made
