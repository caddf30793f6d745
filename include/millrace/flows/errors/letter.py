"""Dead letters: records that a flow could not process, with the reason, in any place.

There are two places, on either host. A *topic* holds the record itself, with Kafka Connect's headers (topic.py); a
*collection* with the schema LETTERS holds a row for each letter (flows/sinks/collection/poison.py). Both become a
:class:`Letter` here, so that one listing shows them.

In a collection, ``stream`` is the flow; ``<flow>/late`` for its late rows; ``<flow>/source`` for records of a stream's
source that could not be decoded; ``<flow>/record`` for records of a pipeline. The id ends with the record's position
(``flights-0-17``), or with the row's number in its batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from millrace.flows.errors.selection import EVERYTHING, ROWS_OF, Selection

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.flows.declare.flow import Flow
    from millrace.flows.errors.listing import ErrorRow

LATE: Final = "/late"
SOURCE: Final = "/source"
RECORD: Final = "/record"
"""Suffixes of a flow's name in letters of late rows, of records of a stream's source, and of records of a pipeline."""
SHOWN: Final = 4_096
"""Characters of a letter's payload in listings."""
MOST_SEEN: Final = 5_000
"""Letters of a collection that one listing reads, the newest ones."""
_POSITION: Final = re.compile(r"(.+-\d+)-(\d+)")


class Letter(BaseModel):
    """A failed record or row, and the reason."""

    model_config = ConfigDict(frozen=True)

    id: str = Field(description="its place: partition-offset of a topic, or the key of a collection")
    flow: str
    lane: str | None = Field(description="the source's lane: topic-partition; for a row of a micro-batch, stream-NAME")
    position: int | None = Field(
        description="its position in that lane; for a row of a micro-batch, the batch's number"
    )
    stage: str = Field(description="VALUE_CONVERTER: it cannot be decoded; TRANSFORMATION: a step; TASK_PUT: the sink")
    step: str = ""
    kind: str = Field(default="", description="a stable name of the cause, such as CAST")
    reason: str
    payload: str | None = Field(description="the record's value or the row, as text; at most 4,096 characters")
    key: str | None = None
    headers: dict[str, str | None] = Field(default_factory=dict)
    timestamp: int | None = Field(default=None, description="of the record, milliseconds since 1970")


class Redriven(NamedTuple):
    """The result of a redrive."""

    looked_at: int = 0
    selected: int = 0
    repeated: int = 0
    """Selected records whose origin occurred before."""
    written: int = 0
    filtered: int = 0
    failed_again: int = 0
    no_origin: int = 0
    """Records whose headers name no origin."""
    others: int = 0
    """Records of other flows that share the topic, or of none. They are ignored and counted only here."""
    stale: int = 0
    """Records left out because the sink had a newer document of their id."""
    queued: int = 0
    """Records of a stream's source that the stream reads again in its next run."""


def of_topic(flow: str, rows: Iterable[ErrorRow]) -> list[Letter]:
    """Return records of an error topic as letters."""
    return [
        Letter(
            id=each.id,
            flow=flow,
            lane=_lane(each),
            position=each.offset,
            stage=each.stage,
            step=each.step,
            kind=each.kind,
            reason=each.reason,
            payload=each.value,
            key=each.key,
            headers=each.headers,
            timestamp=each.timestamp,
        )
        for each in rows
    ]


def _lane(row: ErrorRow) -> str | None:
    of_row = row.topic == f"stream-{row.headers.get(ROWS_OF)}"
    return row.topic if row.topic is None or of_row else f"{row.topic}-{row.partition}"


def of_collection(rows: Iterable[dict[str, Any]]) -> list[Letter]:
    """Return rows of LETTERS as letters."""
    return [_of_row(each) for each in rows]


def _of_row(row: dict[str, Any]) -> Letter:
    flow, text = row["stream"].partition("/")[0], row["row"]
    of_record, undecoded = row["stream"].endswith(RECORD), row["stream"].endswith(SOURCE)
    place = _POSITION.fullmatch(row["id"].rpartition("/")[2]) if of_record or undecoded else None
    fields: Any = json.loads(text) if place is not None else {}
    return Letter(
        id=row["id"],
        flow=flow,
        lane=f"stream-{row['stream']}" if place is None else place[1],
        position=row["batch"] if place is None else int(place[2]),
        stage=fields["stage"] if of_record else "VALUE_CONVERTER" if undecoded else "TASK_PUT",
        step=fields["step"] if of_record else "",
        kind=fields["kind"] if of_record else "",
        reason=row["reason"],
        payload=fields["value"] if of_record else text[:SHOWN],
        key=fields.get("key" if of_record else "_key"),
        timestamp=fields.get("timestamp"),
    )


def letter_collections(stream: Flow) -> list[str]:
    """Return the collections with dead letters of a stream: of its sinks and of its source."""
    named = [getattr(part, "dead_letters", None) for part in (stream.row_sink, stream.late, stream.row_source)]
    return list(dict.fromkeys(name for name in named if name is not None))


def stream_letters(
    settings: Settings, stream: Flow, selection: Selection = EVERYTHING, *, limit: int = 50
) -> list[Letter]:
    """Return at most `limit` dead letters of a stream that `selection` takes, newest first.

    Empty if the stream has no place for them. Raises CollectionNotFound, LogUnavailable, InvalidSettings.
    """
    from millrace.client.database import connect

    found: list[Letter] = []
    if stream.errors_in_topic:
        from millrace.flows.errors.listing import error_page

        found += of_topic(stream.name, error_page(settings, stream, selection, limit=limit).errors)
    names = letter_collections(stream)
    if not names:
        return found
    owners = ", ".join(f"'{stream.name}{part}'" for part in ("", LATE, SOURCE))
    with connect(settings=settings) as db:
        for name in names:
            order = ["batch desc", "id desc"]
            rows = db.collection(name).read(where=f"stream IN ({owners})", order_by=order, limit=MOST_SEEN)
            found += of_collection(rows.to_pylist())
    return [each for each in found if selection.takes_letter(each)][:limit]
