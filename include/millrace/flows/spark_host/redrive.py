"""Send dead letters again: rows that fit now go to the stream's sink and leave the letters, in one batch, once."""

from __future__ import annotations

from typing import Any

from millrace.base.errors import InvalidStream
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.declare.stream import Stream
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.spark_host.incarnations import Kept


def redrive(settings: Settings, stream: Stream) -> dict[str, Any]:
    """Send the letters of a stopped stream again; return ``{"sent": rows, "left": rows}``.

    Completes an earlier redrive that was killed first. Raises InvalidStream, StreamBusy, TickNotReached.
    """
    name = stream.sink.dead_letters
    if name is None:
        raise InvalidStream(f"the stream {stream.name!r} has no dead letters: declare sink.dead_letters")
    kept = Kept(settings, stream.name)
    with kept.locked(), connect(settings=settings) as db:
        sink = CollectionSink(
            settings,
            str(stream.sink.collection),
            memory=kept.folder / "redrive",
            mode=stream.sink.mode,
            partition=stream.sink.partition,
            partition_by=stream.sink.partition_by,
            dead_letters=name,
            stream=stream.name,
        )
        with sink:
            found = db.collection(name).read(where=f"stream = '{stream.name}'")
            sent = sink.redrive(found)
        return {"sent": sent, "left": len(found) - sent}
