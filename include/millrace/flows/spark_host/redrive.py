"""Send dead letters again: rows that fit now go to the stream's sink and leave the letters.

Into a collection, rows and letters move in one batch, once. Any other sink gets the rows first, under the batch and
number of their first attempt, and the letters go when it has acknowledged them: a redrive that is killed in between
sends rows again that change nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from millrace.base.errors import InvalidStream
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import Database, connect
from millrace.flows.declare.flow import Flow, RowSink, letters_of
from millrace.flows.errors.letter import SOURCE, Redriven, of_collection
from millrace.flows.errors.letters import RefusedRow, resent, taken_of
from millrace.flows.errors.selection import EVERYTHING, Selection
from millrace.flows.sinks.collection.model import CollectionSink as Declared
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.memory import begun
from millrace.flows.spark_host.frames import late_letters, plain_sink_of, repeats_rows
from millrace.flows.spark_host.incarnations import Kept
from millrace.flows.spark_host.isolated import IsolatedSink
from millrace.flows.spark_host.undecoded import queue

MOST_AT_ONCE: Final = 50_000
"""Letters of a place that one redrive looks at, the oldest: it holds them in memory."""


def redrive(settings: Settings, stream: Flow, selection: Selection = EVERYTHING, *, dry_run: bool = False) -> Redriven:
    """Send the letters of a stopped stream again that `selection` takes, those of its late rows too.

    `dry_run` only counts them. Records of its source that did not decode are `queued`: the stream reads them again when
    it runs next, through its transform, and their letters go when they decode.

    Completes an earlier redrive that was killed first. Raises InvalidStream, StreamBusy, TickNotReached, and what the
    sinks raise.
    """
    targets = [(stream.row_sink, stream.name)]
    if stream.late is not None:
        targets.append((stream.late, late_letters(stream.name)))
    targets = [each for each in targets if letters_of(stream, each[0]) is not None]
    source = getattr(stream.source, "dead_letters", None)
    if not targets and source is None:
        raise InvalidStream(f"the stream {stream.name!r} has no dead letters: declare sink.dead_letters")
    kept = Kept(settings, stream.name)
    found = sent = seen = queued = 0
    with kept.locked(), connect(settings=settings) as db:
        for into, named in targets:
            folder = kept.folder / ("redrive" if into is stream.row_sink else "redrive-late")
            looked, letters = _chosen(db.collection(str(letters_of(stream, into))), named, selection)
            seen, found = seen + looked, found + len(letters)
            if dry_run:
                continue
            if isinstance(into, Declared):
                sent += _into_collection(settings, into, named, folder, letters)
            else:
                sent += _one_by_one(settings, stream, into, named, folder, db, letters)
        failed = 0 if dry_run else found - sent
        if source is not None:
            looked, letters = _chosen(db.collection(source), f"{stream.name}{SOURCE}", selection)
            seen, found = seen + looked, found + len(letters)
            queued = 0 if dry_run else queue(settings, stream.name, letters)
    return Redriven(looked_at=seen, selected=found, written=sent, failed_again=failed, queued=queued)


def _chosen(letters: Collection, named: str, selection: Selection) -> tuple[int, pa.Table]:
    """Return how many letters of `named` there are, and those that `selection` takes, the oldest MOST_AT_ONCE of all.

    A redrive is repeated for more.
    """
    found = letters.read(where=f"stream = '{named}'", order_by=["batch", "id"], limit=MOST_AT_ONCE)
    mask = [selection.takes_letter(each) for each in of_collection(found.to_pylist())]
    return len(found), found.filter(pa.array(mask, pa.bool_()))


class _Stay:
    """Letters whose rows fail again are there already."""

    def put(self, batch: int, rows: Sequence[RefusedRow]) -> None: ...

    def close(self) -> None: ...


def _into_collection(settings: Settings, into: Declared, named: str, folder: Path, found: pa.Table) -> int:
    """Return how many of the letters went in."""
    sink = CollectionSink(
        settings,
        into.collection,
        memory=folder,
        mode=into.mode,
        partition=into.partition,
        partition_by=into.partition_by,
        dead_letters=into.dead_letters,
        stream=named,
    )
    with sink:
        return sink.redrive(found)


def _one_by_one(
    settings: Settings, stream: Flow, into: RowSink, named: str, folder: Path, db: Database, found: pa.Table
) -> int:
    """Return the same."""
    letters = db.collection(str(letters_of(stream, into)))
    sent = 0
    for began, batch, ids in resent(found, named):
        memory = folder / str(began)
        begun(memory, at=began)
        plain, parts = plain_sink_of(settings, stream, memory, into, named), repeats_rows(stream, into)
        sink = IsolatedSink(plain, _Stay(), stream.errors, memory=memory, lane=named, parts=parts)
        try:
            sink.write(batch)
            gone = taken_of(batch, ids, sink.aside)
        finally:
            sink.close()
        hit("redrive.resent")
        if gone:
            letters.delete(gone)
            sent += len(gone)
    # The next redrive is another stream to a topic's readers: what failed again comes after what was sent now.
    shutil.rmtree(folder, ignore_errors=True)
    return sent
