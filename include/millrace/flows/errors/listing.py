"""The content of a flow's error topic, newest first, page by page: the reason, the origin, the record itself.

Kafka reads forward only, so a page is read in windows from the end backwards. Each call reads a bounded number of
records, whatever it searches for.
"""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, Field

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.letters import ROW
from millrace.flows.errors.selection import PREFIX, Place, Selection
from millrace.flows.errors.topic import error_source, is_of, origin_of
from millrace.flows.records import Record
from millrace.flows.sources.kafka.topics import Reader, Topics
from millrace.flows.sources.source import task_of

WINDOW: Final = 500
"""Records in one read."""
MOST_SEEN: Final = 5_000
"""The most records that one page reads."""
SHOWN_BYTES: Final = 4_096
"""The most bytes shown of a key, a value or a header."""
SHOWN_HEADERS: Final = 64 << 10
"""The most characters shown of a record's headers. Connect's headers are always shown."""
_WINDOW_BYTES: Final = 16 << 20


class ErrorRow(BaseModel):
    """A failed record and the reason."""

    id: str = Field(description="its place in the error topic: partition-offset")
    timestamp: int = Field(description="the record's timestamp, milliseconds since 1970")
    topic: str | None = Field(description="its original topic; null if the headers do not name it")
    partition: int | None
    offset: int | None
    stage: str
    step: str
    kind: str
    reason: str
    headers: dict[str, str | None] = Field(description="all headers; Kafka Connect's have its names")
    key: str | None
    value: str | None = Field(description="null: a tombstone; bytes that are not UTF-8 are replaced")
    value_bytes: int = Field(description="the length of the whole value; `value` has at most 4,096")


class ErrorPage(BaseModel):
    topic: str
    total: int = Field(
        description="upper bound of the pipeline's records in the topic: all records except"
        " those of others that this page saw"
    )
    errors: list[ErrorRow]
    next: str | None = Field(description="pass it as `before`; null: this is the last page")
    complete: bool = Field(description="false: the search stopped at its bound; continue with `next`")


def error_page(settings: Settings, flow: Flow, selection: Selection, *, before: str = "", limit: int = 50) -> ErrorPage:
    """Return a page of the newest records that `selection` takes, before the cursor of an earlier page.

    Raises LogUnavailable, ChannelNotFound, InvalidSettings (the brokers refuse), InvalidArgument.
    """
    if flow.errors.collection is not None:
        return _collected_page(settings, flow, selection, before=before, limit=limit)
    source = error_source(flow)
    group = f"{flow.consumer_group}-look"
    topics = Topics(source, group)
    search = _Search(flow.name, selection, limit)
    cursor = _cursor(before)
    total, more = 0, False
    try:
        ends = topics.ends()
        for topic, partition in topics.partitions():
            low, high = ends[task_of(topic, partition)]
            total += high - low
            begin, end = selection.bounds(partition) or (low, low)
            low, high = max(low, begin), min(high, end, cursor.get(partition, high))
            if low < high and not search.over:
                reader = Reader(source, group, topic, partition)
                try:
                    high = search.backwards(reader, low, high)
                finally:
                    reader.close()
            cursor[partition] = high
            more = more or low < high
    finally:
        topics.close()
    return ErrorPage(
        topic=flow.errors_topic,
        total=total - search.others,
        errors=search.found,
        next=",".join(str(Place(*each)) for each in sorted(cursor.items())) if more else None,
        complete=not more or len(search.found) >= limit,
    )


def _collected_page(settings: Settings, flow: Flow, selection: Selection, *, before: str, limit: int) -> ErrorPage:
    """Return the page for a collection of dead letters."""
    from millrace.flows.errors.collection import newest

    found, cursor, complete, total = newest(settings, flow, selection, before=before, limit=limit)
    rows = []
    for each in found:
        topic, _, partition = (each.lane or "").rpartition("-")
        rows.append(
            ErrorRow(
                id=each.id,
                timestamp=each.timestamp or 0,
                topic=topic or None,
                partition=int(partition) if topic else None,
                offset=each.position,
                stage=each.stage,
                step=each.step,
                kind=each.kind,
                reason=each.reason,
                headers={},
                key=each.key,
                value=each.payload,
                value_bytes=len((each.payload or "").encode()),
            )
        )
    return ErrorPage(
        topic=str(flow.errors.collection),
        total=total,
        errors=rows,
        next=cursor or None,
        complete=complete,
    )


class _Search:
    """The results of one page's search, and how many more records it may read."""

    def __init__(self, flow: str, selection: Selection, limit: int) -> None:
        self._flow, self._selection, self._limit = flow, selection, limit
        self.others = 0
        """Records of other flows among those that it read."""
        self._left = MOST_SEEN
        self.found: list[ErrorRow] = []

    @property
    def over(self) -> bool:
        return self._left <= 0 or len(self.found) >= self._limit

    def backwards(self, reader: Reader, low: int, high: int) -> int:
        """Search [low, high) from its end; return the end of the part that was not searched."""
        while low < high and not self.over:
            begin = max(low, high - WINDOW)
            place, window, seen = begin, list[tuple[int, ErrorRow]](), 0
            while place < high:
                more, place = reader.read(place, high, items=WINDOW, size=_WINDOW_BYTES, seconds=1.0)
                seen += len(more)
                own = [record for record in more if is_of(record, self._flow)]
                self.others += len(more) - len(own)
                # Convert to rows at once: records may be large, and holding so many could exhaust memory.
                window += [(record.offset, _row(record)) for record in own if self._selection.takes(record)]
                del more, own
            self._left -= max(1, seen)
            for offset, row in reversed(window):
                if len(self.found) >= self._limit:
                    return offset + 1
                self.found.append(row)
            high = begin
        return max(low, high)


def _row(record: Record) -> ErrorRow:
    headers = _headers(record)
    origin = origin_of(record)
    return ErrorRow(
        id=str(Place(record.partition, record.offset)),
        timestamp=record.timestamp,
        topic=None if origin is None else origin.topic,
        partition=None if origin is None else origin.partition,
        offset=None if origin is None else origin.offset,
        stage=headers.get(f"{PREFIX}stage") or "",
        step=headers.get(f"{PREFIX}class.name") or "",
        kind=headers.get(f"{PREFIX}exception.class.name") or "",
        reason=headers.get(f"{PREFIX}exception.message") or "",
        headers=headers,
        key=_text(record.key),
        value=_text(record.value),
        value_bytes=len(record.value or b""),
    )


def _headers(record: Record) -> dict[str, str | None]:
    headers: dict[str, str | None] = {}
    left = SHOWN_HEADERS
    for name, value in record.headers:
        text = _text(value)
        left -= len(name) + len(text or "")
        if (left >= 0 and name != ROW) or name.startswith(PREFIX):
            headers[name[:SHOWN_BYTES]] = text
    return headers


def _text(value: bytes | None) -> str | None:
    return None if value is None else value[:SHOWN_BYTES].decode(errors="replace")


def _cursor(before: str) -> dict[int, int]:
    if not before:
        return {}
    places = [Place.parse(each) for each in before.split(",")]
    if len({place.partition for place in places}) < len(places):
        raise InvalidArgument(f"{before[:60]!r} names a partition twice: pass the `next` of an earlier page")
    return {place.partition: place.offset for place in places}
