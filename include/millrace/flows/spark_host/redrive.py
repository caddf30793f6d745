"""Send dead letters again: rows that fit now go to the stream's sink and leave the letters.

Into a collection, rows and letters move in one batch, once. Any other sink gets the rows first, under the batch and
number of their first attempt, and the letters go when it has acknowledged them: a redrive that is killed in between
sends rows again that change nothing.

Letters of an error topic stay there. The consumer group ``<group>-redrive`` stores where the last redrive ended; a
selection moves nothing. A row or record that fails again is produced again before that moves. What a redrive is about
to do is noted, so that one that is killed is completed by the next one:

    redrive.json    beside the checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from millrace.base.errors import InvalidStream
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import connect
from millrace.flows.declare.flow import Flow, RowSink, has_letters, letters_of
from millrace.flows.errors.letter import LATE, SOURCE, Redriven, of_collection
from millrace.flows.errors.letters import LetterTopic, RefusedRow, RowLetters, letters_from, resent, taken_of
from millrace.flows.errors.redrive import read_letters, settle
from millrace.flows.errors.selection import EVERYTHING, Selection, rows_of
from millrace.flows.sinks.collection.model import CollectionSink as Declared
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.memory import Folder, begun, below, keep_note, read_note
from millrace.flows.spark_host.frames import late_letters, plain_sink_of, repeats_rows
from millrace.flows.spark_host.incarnations import Incarnations, remove_folder
from millrace.flows.spark_host.isolated import IsolatedSink
from millrace.flows.spark_host.undecoded import letters_from as source_letters
from millrace.flows.spark_host.undecoded import next_number, queue
from millrace.storage.store import store_at

_NOTE: Final = "redrive.json"
MOST_AT_ONCE: Final = 50_000
"""The most letters of a place that one redrive reads, the oldest, since it holds them in memory."""


def redrive(
    settings: Settings,
    stream: Flow,
    selection: Selection = EVERYTHING,
    *,
    again: bool = False,
    dry_run: bool = False,
) -> Redriven:
    """Send the letters of a stopped stream that `selection` takes again, including those of late rows.

    From an error topic, send those after the last redrive, or with `again` from the beginning.

    `dry_run` only counts them. Records of its source that could not be decoded are `queued`: the stream reads them
    again in its next run, through its transform, and their letters are deleted when they decode.

    Completes an earlier redrive that was killed first. Raises InvalidStream, StreamBusy, TickNotReached, and the errors
    of the sinks.
    """
    targets = [(stream.row_sink, stream.name)]
    if stream.late is not None:
        targets.append((stream.late, late_letters(stream.name)))
    targets = [each for each in targets if has_letters(stream, each[0])]
    source = getattr(stream.source, "dead_letters", None)
    if not targets and source is None and not stream.errors_in_topic:
        raise InvalidStream(
            f"the stream {stream.name!r} has no dead letters: declare errors.collection or errors.topic"
        )
    incarnations = Incarnations(settings, stream.name)
    done = Redriven()
    with incarnations.locked(), connect(settings=settings) as db:
        for into, named in targets:
            collection = letters_of(stream, into)
            if collection is None:
                continue
            letters = db.collection(collection)
            looked, chosen = _chosen(letters, named, selection)
            sent = 0
            if not dry_run and isinstance(into, Declared):
                sent = _into_collection(settings, into, named, incarnations, chosen)
            elif not dry_run:
                for ids in _one_by_one(settings, stream, into, named, incarnations, chosen):
                    letters.delete(ids)
                    sent += len(ids)
            failed = 0 if dry_run else len(chosen) - sent
            done = _sum(done, Redriven(looked_at=looked, selected=len(chosen), written=sent, failed_again=failed))
        if source is not None:
            looked, chosen = _chosen(db.collection(source), f"{stream.name}{SOURCE}", selection)
            queued = 0 if dry_run else queue(settings, stream.name, chosen)
            done = _sum(done, Redriven(looked_at=looked, selected=len(chosen), queued=queued))
        if stream.errors_in_topic:
            done = _sum(
                done, _from_topic(settings, stream, targets, incarnations, selection, again=again, dry_run=dry_run)
            )
    return done


def _sum(one: Redriven, other: Redriven) -> Redriven:
    return Redriven(*(a + b for a, b in zip(one, other, strict=True)))


def _from_topic(
    settings: Settings,
    stream: Flow,
    targets: Sequence[tuple[RowSink, str]],
    incarnations: Incarnations,
    selection: Selection,
    *,
    again: bool,
    dry_run: bool,
) -> Redriven:
    """Redrive the letters of the error topic, at most MOST_AT_ONCE of them."""
    folder = incarnations.folder
    moves = selection.whole and not dry_run
    note: dict[str, Any] = {}
    if moves and (found_note := read_note(folder, _NOTE)) is not None:
        note = found_note
        again = bool(note["again"])
    found = read_letters(stream, selection, again=again, most=MOST_AT_ONCE, ends=note.get("ends"))
    counts = found.counts
    if dry_run or not found.records:
        if moves:
            settle(stream, found.places)
        return Redriven(**counts)
    own = [each for each in found.records if not rows_of(each, each.topic)]
    sinks = {
        named: (into, letters_from([each for each in found.records if rows_of(each, each.topic) == named]))
        for into, named in targets
        if letters_of(stream, into) is None
    }
    if moves and not note:
        note = {"again": again, "ends": found.places, "queue": next_number(settings, stream.name), "batches": {}}
        for named, (into, _) in sinks.items():
            if isinstance(into, Declared):
                with _collection_sink(settings, into, named, incarnations) as sink:
                    note["batches"][named] = sink.standing([named]).get(named, 0)
        keep_note(folder, _NOTE, note)
    for named, (into, letters) in sinks.items():
        if not letters.num_rows:
            continue
        if isinstance(into, Declared):
            batch, whose = note.get("batches", {}).get(named), stream if moves else None
            sent = _into_collection(settings, into, named, incarnations, letters, batch=batch, stream=whose)
        else:
            sent = sum(map(len, _one_by_one(settings, stream, into, named, incarnations, letters, stay=moves)))
        counts["written"] += sent
        counts["failed_again"] += letters.num_rows - sent
    hit("redrive.sent")
    if own and note.get("queue", 0) in (0, next_number(settings, stream.name)):
        counts["queued"] += queue(settings, stream.name, source_letters(stream.name, own))
    hit("redrive.queued")
    if moves:
        settle(stream, found.places)
        store_at(folder).delete([_NOTE])
    return Redriven(**counts)


def _chosen(letters: Collection, named: str, selection: Selection) -> tuple[int, pa.Table]:
    """Return the number of letters of `named`, and those of the oldest MOST_AT_ONCE that `selection` takes.

    Repeat the redrive for more.
    """
    found = letters.read(where=f"stream = '{named}'", order_by=["batch", "id"], limit=MOST_AT_ONCE)
    mask = [selection.takes_letter(each) for each in of_collection(found.to_pylist())]
    return len(found), found.filter(pa.array(mask, pa.bool_()))


class _Stay:
    """A place that writes nothing: the letters of rows that fail again exist already."""

    def put(self, batch: int, rows: Sequence[RefusedRow]) -> None: ...

    def close(self) -> None: ...


def _collection_sink(settings: Settings, into: Declared, named: str, incarnations: Incarnations) -> CollectionSink:
    return CollectionSink(
        settings,
        into.collection,
        memory=_memory(incarnations, named),
        mode=into.mode,
        partition=into.partition,
        partition_by=into.partition_by,
        dead_letters=into.dead_letters,
        stream=named,
    )


def _memory(incarnations: Incarnations, named: str) -> Folder:
    return below(incarnations.folder, "redrive-late" if named.endswith(LATE) else "redrive")


def _into_collection(
    settings: Settings,
    into: Declared,
    named: str,
    incarnations: Incarnations,
    found: pa.Table,
    *,
    batch: int | None = None,
    stream: Flow | None = None,
) -> int:
    """Return how many letters succeeded: all, if the sink has the `batch` that a killed redrive sent them as.

    With `stream`, letters that do not fit are first produced to its error topic again.
    """

    def stay(letters: pa.Table) -> None:
        if stream is None:
            return
        for began, batch, _ in resent(letters, named):
            place = LetterTopic(stream, stream=named, begun=began)
            rows, numbers = batch.table(), batch.numbers or ()
            try:
                place.put(
                    batch.start,
                    [
                        RefusedRow(each, rows.slice(at, 1), "REDRIVE", "the row still does not fit")
                        for at, each in enumerate(numbers)
                    ],
                )
            finally:
                place.close()

    with _collection_sink(settings, into, named, incarnations) as sink:
        if batch is not None and sink.standing([named]).get(named, 0) > batch:
            return len(found)
        return sink.redrive(found, stay=stay)


def _one_by_one(
    settings: Settings,
    stream: Flow,
    into: RowSink,
    named: str,
    incarnations: Incarnations,
    found: pa.Table,
    *,
    stay: bool = False,
) -> Iterator[list[str]]:
    """Send the letters again, batch by batch, and yield the ids of those that succeeded.

    With `stay`, letters that fail again are produced to the error topic again.
    """
    folder = _memory(incarnations, named)
    for began, batch, ids in resent(found, named):
        memory = below(folder, str(began))
        begun(memory, at=began)
        plain, parts = plain_sink_of(settings, stream, memory, into, named), repeats_rows(stream, into)
        place: RowLetters = LetterTopic(stream, stream=named, begun=began) if stay else _Stay()
        sink = IsolatedSink(plain, place, stream.errors, memory=memory, lane=named, parts=parts)
        try:
            sink.write(batch)
            gone = taken_of(batch, ids, sink.aside)
        finally:
            sink.close()
        hit("redrive.resent")
        if gone:
            yield gone
    # The next redrive is another stream to a topic's readers, so letters that failed again come after those sent now.
    remove_folder(folder)
