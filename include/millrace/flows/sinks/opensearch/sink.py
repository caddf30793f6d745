"""The OpenSearch sink: lanes of bulk requests, each with its own ids, retried with jittered pauses, item by item.

An id's actions are in one lane, in order. Without external versions no bulk holds an id twice, so that a retried item
never follows a later one. The effect of an unanswered request is unknown: it is repeated, which is idempotent.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from millrace.base.backoff import Backoff
from millrace.base.errors import BatchRefused, InvalidArgument, SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.conversion import documents_of, iso_text
from millrace.flows.documents import Refused
from millrace.flows.records import TASK_PUT, Action, Failure
from millrace.flows.sinks.memory import Folder, begun
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.opensearch import bulk as bulks
from millrace.flows.sinks.opensearch.bulk import Busy, Item, TooLarge, Verdict, send
from millrace.flows.sinks.opensearch.index import (
    Target,
    client_of,
    exists,
    identity_of,
    index_path,
    is_healthy,
    make,
    roll_over,
    target_of,
)
from millrace.flows.sinks.opensearch.model import OpenSearchSink as Declared
from millrace.flows.sinks.opensearch.naming import IndexNames
from millrace.flows.sinks.opensearch.window import Window
from millrace.flows.sinks.sink import Verdicts, require_some

MAX_ID_BYTES: Final = 512
STEP: Final = "opensearch"
_ID_LENGTH: Final = "ID_LENGTH"
_OWN: Final = frozenset({_ID_LENGTH, "INDEX_NAME", "NO_KEY"})
"""Kinds that are known before a document is sent."""
_DOCUMENTS_FAULT: Final = frozenset(
    {
        "mapper_parsing_exception",
        "strict_dynamic_mapping_exception",
        "document_parsing_exception",
        "HTTP_413",
        "HTTP_500",
    }
)
"""Kinds that only a document can cause. For any other kind, the index is checked."""
_TOO_LARGE: Final = "HTTP_413"
_LINE: Final = 64
"""About the bytes of a document's own line in a bulk."""
_TRIES: Final = 3
"""The fewest responses with 500 to a document before it counts as the cause."""
_LOOK_SECONDS: Final = 1.0
_ROLLOVER_SECONDS: Final = 60.0
_BATCH_BITS: Final = 31
"""Bits of a version for a micro-batch's number. The bits above are a Unix time in seconds."""


class OpenSearchSink:
    """Writes the documents of one task into one index."""

    def __init__(
        self,
        declared: Declared,
        *,
        flush_items: int,
        flush_bytes: int,
        memory: Folder | None = None,
        key: Sequence[str] = (),
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For rows, `memory` is the sink's folder, and the columns `key` form a document's id.

        Raises InvalidArgument for ids of rows by a template, or by key without columns.
        """
        if memory is not None and (declared.ids == "template" or (declared.ids == "key") != bool(key)):
            raise InvalidArgument(f"ids of rows must be by position, or by key with its columns, not {declared.ids}")
        self._declared = declared
        self._key = tuple(key)
        self._begun = 0 if memory is None else begun(memory)
        self._client = client_of(declared)
        self._window = Window(items=flush_items, size=flush_bytes)
        self._sleep, self._clock = sleep, clock
        self._equal_wins = declared.version_field is not None or memory is not None
        self._once = declared.ids != "position" and (not declared.versions or self._equal_wins)
        self._target: Target | None = None
        self._looked = 0.0
        self._names = IndexNames(declared) if declared.index_suffix else None
        self._rolled = clock()
        self._threads: ThreadPoolExecutor | None = None

    def check(self, schema: pa.Schema, /) -> None:
        """Raise InvalidArgument for rows without a column of the id."""
        missing = [name for name in self._key if name not in schema.names]
        if missing:
            raise InvalidArgument(f"the rows have no column {missing[0]!r}, which is a document's id")

    def open(self) -> None:
        """Find or create the index. Raises SinkBusy, SinkRefused."""
        if not exists(self._client, self._declared):
            if not self._declared.create_index:
                raise SinkRefused(f"there is no index {self._declared.index_base}: create it, or set create_index")
            make(self._client, self._declared)
        self._target = Target() if self._names is not None else target_of(self._client, self._declared)
        self._looked = self._clock()

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return nothing: ids and versions make a replay idempotent."""
        return {}

    def write(self, batch: Batch, /) -> Verdicts:
        """Write a batch by bulk requests. Raises SinkBusy, SinkRefused, BatchRefused."""
        written = Verdicts()
        actions = self._documents_of(batch, written) if batch.documents is None else batch.documents
        if self._clock() - self._looked >= _LOOK_SECONDS:
            self._require_same()
        if self._declared.rollover is not None and self._clock() - self._rolled >= _ROLLOVER_SECONDS:
            self._rolled = self._clock()
            roll_over(self._client, self._declared)
        lanes: list[list[Action]] = [[] for _ in range(self._declared.requests)]
        for action in actions:
            name = action.id.encode(errors="surrogatepass")
            if not 0 < len(name) <= MAX_ID_BYTES:
                reason = f"an id has 1 to {MAX_ID_BYTES} bytes, and this one has {len(name)}"
                written.failures.append(Failure(action.record, TASK_PUT, STEP, _ID_LENGTH, reason))
            elif (error := self._misplaced(action)) is not None:
                written.failures.append(Failure(action.record, TASK_PUT, STEP, error.kind, str(error)))
            else:
                lanes[zlib.crc32(name) % len(lanes)].append(action)
        busy = [lane for lane in lanes if lane]
        if len(busy) < 2:
            done = [self._lane(lane) for lane in busy]
        else:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._declared.requests, thread_name_prefix="bulk")
            started = [self._threads.submit(self._apart, lane) for lane in busy]
            outcomes = [each.exception() or each.result() for each in started]  # wait for all before one is raised
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            if errors:
                raise _with_all_taken(errors, zip(busy, outcomes, strict=True))
            done = [outcome for outcome in outcomes if isinstance(outcome, Verdicts)]
        for each in done:
            written.add(each)
        if written.failures:
            self._require_documents_fault(written)
        if busy:
            self._require_same()
        return written

    def _misplaced(self, action: Action) -> Refused | None:
        """Return why the document's index cannot be named, if each document has its own."""
        if self._names is not None:
            try:
                self._names.of(action)
            except Refused as error:
                return error
        return None

    def _documents_of(self, batch: Batch, written: Verdicts) -> list[Action]:
        """Return the rows of a micro-batch as documents.

        The version is the second at which the query's checkpoint began, followed by the batch's number: a query with a
        new checkpoint counts from 0, and its documents are newer. The last row of an id in a batch wins, as equal
        versions replace each other.
        """
        versions = self._declared.versions and bool(self._key)
        version = self._begun << _BATCH_BITS | batch.start if versions else None
        found: list[Action] = []
        for action in documents_of(batch, key=self._key, changes=True, version=version, text=iso_text):
            if self._key and action.record.key is None:
                reason = f"the row has no {self._key[0]}, which is its id"
                written.failures.append(Failure(action.record, TASK_PUT, STEP, "NO_KEY", reason))
            else:
                found.append(action)
        return found

    def _require_same(self) -> None:
        """Raise SinkRefused if the index was removed, or replaced by another of its name with arbitrary mappings."""
        if self._target is None:
            self.open()
        elif self._target.identity:
            if identity_of(self._client, self._declared) != self._target.identity:
                target_of(self._client, self._declared)  # its error is more precise if the name is no longer an index
                raise SinkRefused(
                    f"index {self._declared.index_base} was replaced during the run: check its mappings, and set the"
                    " offsets to the beginning of its documents"
                )
            self._looked = self._clock()

    def _require_documents_fault(self, written: Verdicts) -> None:
        """Raise SinkRefused if the index itself refuses documents: otherwise all would go to the error topic."""
        refused = [each for each in written.failures if each.kind not in _OWN]
        if self._names is None and any(each.kind not in _DOCUMENTS_FAULT for each in refused):
            target_of(self._client, self._declared)  # do not store the result: it may be another index by now
        require_some(written, refused, f"index {self._declared.index_base}")

    def close(self) -> None:
        """Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._client.close()

    def _apart(self, actions: Sequence[Action]) -> Verdicts:
        """Write a lane in its own thread, and count its CPU time."""
        begun = time.thread_time()
        written = self._lane(actions)
        written.cpu_seconds = time.thread_time() - begun
        return written

    def _lane(self, actions: Sequence[Action]) -> Verdicts:
        """Write all actions of a lane, bulk by bulk. An error has the accepted ones in `taken`."""
        written, left = Verdicts(), deque(actions)
        bulk: list[Action] = []
        try:
            return self._bulks(actions, left, bulk, written)
        except (SinkBusy, BatchRefused) as error:
            others = {each.record.position for each in (*left, *bulk)}
            others |= {each.record.position for each in written.failures}
            error.taken = frozenset(each.record.offset for each in actions if each.record.position not in others)
            raise

    def _bulks(self, actions: Sequence[Action], left: deque[Action], bulk: list[Action], written: Verdicts) -> Verdicts:
        """Send `left`, and count it in `written`; `bulk` has the actions in flight."""
        backoff = Backoff(self._declared.backoff_ms / 1000, self._declared.max_backoff_ms / 1000)
        since = self._clock()
        whole = 0
        """The largest bulk that may be accepted after one was refused for its size; 0 if none was."""
        behind: dict[int, int] = {}
        tries: dict[str, int] = {}
        """Counts, by position, of documents that were answered with 500 alone."""
        while left:
            bulk[:] = self._cut(left, whole)
            written.bulks += 1
            try:
                items = send(
                    self._client,
                    "" if self._names is not None else index_path(self._declared.index_base),
                    bulk,
                    refresh=self._declared.refresh,
                    alias=self._target is not None and self._target.alias,
                    equal_wins=self._equal_wins,
                    indices=[] if self._names is None else [self._names.of(action) for action in bulk],
                    added=self._declared.data_stream,
                )
            except TooLarge as error:
                if len(bulk) == 1:
                    written.failures.append(Failure(bulk[0].record, TASK_PUT, STEP, error.kind, str(error)))
                    since = self._clock()
                else:
                    left.extendleft(reversed(bulk))
                    whole = self._halved(bulk, error.kind)
                continue
            except Busy as error:
                if error.internal:
                    whole = max(1, len(bulk) // 2)  # one of them may be the cause: smaller bulks find it
                alone = bulk if error.internal and len(bulk) == 1 else []
                if self._again(left, bulk, written, str(error), since, backoff, alone, tries):
                    since = self._clock()
                    backoff.reset()
                continue
            except bulks.Refused as error:
                raise SinkRefused(f"index {self._declared.index_base}: {error}") from None
            whole = 0
            again, alone, reason = [], [], ""
            for action, item in zip(bulk, items, strict=True):
                match item.verdict:
                    case Verdict.DONE:
                        written.acknowledged += 1
                    case Verdict.STALE:
                        _count_late(written, item, action, actions, behind)
                    case Verdict.REPEATED:
                        written.acknowledged += 1
                        written.repeated += 1
                    case Verdict.FAILED:
                        written.failures.append(Failure(action.record, TASK_PUT, STEP, item.kind, item.reason))
                    case Verdict.AGAIN:
                        again.append(action)
                        alone += [action] if item.internal else []
                        reason = f"{item.kind}: {item.reason}"
                    case Verdict.REFUSED:
                        raise self._refusal(item)
            if len(again) < len(bulk):
                since = self._clock()
                backoff.reset()
            if again:
                if self._again(left, again, written, reason, since, backoff, alone, tries):
                    since = self._clock()
            else:
                self._window.grow()
        return written

    def _halved(self, bulk: Sequence[Action], kind: str) -> int:
        """Return how many documents to send next of a bulk that was refused as a whole."""
        if kind == _TOO_LARGE:
            self._window.fit(sum(len(each.body or b"") + len(each.id) + _LINE for each in bulk))
        return len(bulk) // 2

    def _refusal(self, item: Item) -> SinkRefused | BatchRefused:
        """Return the error for a document that its index refuses through no fault of the document."""
        words = f"index {self._declared.index_base}: {item.kind}: {item.reason}"
        # With many indices, the document's own may be closed or forbidden while the others are not.
        return SinkRefused(words) if self._names is None else BatchRefused(words)

    def _again(
        self,
        left: deque[Action],
        bulk: Sequence[Action],
        written: Verdicts,
        reason: str,
        since: float,
        backoff: Backoff,
        suspects: Sequence[Action],
        tries: dict[str, int],
    ) -> bool:
        """Put `bulk` back before `left`, in smaller bulks, after a pause; return whether documents were put aside.

        When the time for retries has passed, `suspects` (documents that were answered with 500 alone, counted in
        `tries`) are put aside if the index accepts others. Raises SinkBusy if there are none.
        """
        aside: set[int] = set()
        for each in suspects:
            tries[each.record.position] = tries.get(each.record.position, 0) + 1
        certain = all(tries[each.record.position] >= _TRIES for each in suspects)
        if certain and self._clock() - since >= self._declared.patience_ms / 1000:
            if suspects and (written.acknowledged or is_healthy(self._client, self._declared)):
                aside = {id(each) for each in suspects}
                for each in suspects:
                    words = (
                        f"OpenSearch fails on document {each.id[:MAX_ID_BYTES]!r} ({each.record.position}): {reason}"
                    )
                    written.failures.append(Failure(each.record, TASK_PUT, STEP, "HTTP_500", words))
            if not aside:
                first = bulk[0]
                raise SinkBusy(
                    f"OpenSearch does not accept {len(bulk)} documents, the first {first.id[:100]!r}"
                    f" ({first.record.position}): {reason}",
                    retry_after=self._declared.max_backoff_ms / 1000,
                )
        left.extendleft(each for each in reversed(bulk) if id(each) not in aside)
        written.retries += len(bulk) - len(aside)
        if len(aside) < len(bulk):
            self._window.shrink()
            self._sleep(backoff.next_delay())
        return bool(aside)

    def _cut(self, left: deque[Action], most: int) -> list[Action]:
        """Take the next bulk, of at least one action, from `left`."""
        items, size = self._window.items, self._window.bytes
        items = min(items, most) if most else items
        bulk: list[Action] = []
        ids: set[str] = set()
        while left and len(bulk) < items and (size > 0 or not bulk):
            if self._once:
                if left[0].id in ids:
                    break
                ids.add(left[0].id)
            action = left.popleft()
            size -= len(action.body or b"") + len(action.id) + _LINE
            bulk.append(action)
        return bulk


def _with_all_taken(
    errors: Sequence[BaseException], lanes: Iterable[tuple[Sequence[Action], Verdicts | BaseException]]
) -> BaseException:
    """Return the error to raise for several lanes, with all accepted documents of them."""
    last = next((each for each in errors if not isinstance(each, SinkBusy | BatchRefused)), errors[0])
    if not isinstance(last, SinkBusy | BatchRefused):
        return last
    taken: set[int] = set()
    for actions, outcome in lanes:
        if isinstance(outcome, Verdicts):
            refused = {each.record.position for each in outcome.failures}
            taken |= {each.record.offset for each in actions if each.record.position not in refused}
        elif isinstance(outcome, SinkBusy | BatchRefused):
            taken |= outcome.taken
    last.taken = frozenset(taken)
    return last


def _count_late(
    written: Verdicts, item: Item, action: Action, actions: Sequence[Action], behind: dict[int, int]
) -> None:
    """Count an action of `actions` that a newer version preceded.

    `behind` is filled once: for each action, the largest version of its id from it on.
    """
    if not behind:
        newest: dict[str, int] = {}
        for each in reversed(actions):
            behind[id(each)] = newest[each.id] = max(newest.get(each.id, 0), each.version or 0)
    written.acknowledged += 1
    # If a later action of the batch replaced it in an earlier attempt, it was written, too.
    if item.there is not None and item.there <= behind[id(action)]:
        written.repeated += 1
    else:
        written.stale += 1


def made(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> OpenSearchSink:
    """Return the sink that `flow` declares."""
    return OpenSearchSink(declared, flush_items=flush.items, flush_bytes=max(1, int(flush.mib * (1 << 20))))
