"""The OpenSearch sink: lanes of bulk requests, each with ids of its own, sent again with jittered pauses until answered item by item.

An id's actions are in one lane, in order; without external versions no bulk holds an id twice, so that an item that is sent again
never comes behind a later one. What a request did that got no answer is not known: it is sent again, which is the same.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from millrace.base.errors import SinkBusy, SinkRefused
from millrace.base.pauses import jittered
from millrace.base.settings import Settings
from millrace.pipelines.model.pipeline import Pipeline
from millrace.pipelines.model.sinks import OpenSearchSink as Declared
from millrace.pipelines.records import TASK_PUT, Action, Failure
from millrace.pipelines.sinks.opensearch.bulk import Busy, Refused, TooLarge, Verdict, send
from millrace.pipelines.sinks.opensearch.index import client_of, exists, index_path, make
from millrace.pipelines.sinks.opensearch.window import Window
from millrace.pipelines.sinks.sink import Written

MAX_ID_BYTES: Final = 512
STEP: Final = "opensearch"


class OpenSearchSink:
    """Documents of one task into one index."""

    def __init__(
        self,
        declared: Declared,
        *,
        flush_items: int,
        flush_bytes: int,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._declared = declared
        self._client = client_of(declared)
        self._window = Window(items=flush_items, size=flush_bytes)
        self._sleep, self._clock = sleep, clock
        self._once = declared.ids != "position" and not declared.versions
        self._threads: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """As millrace.pipelines.sinks.sink.Sink says."""
        if exists(self._client, self._declared):
            return
        if not self._declared.create_index:
            raise SinkRefused(f"there is no index {self._declared.index_base}: make it, or say create_index")
        make(self._client, self._declared)

    def write(self, actions: Sequence[Action], /) -> Written:
        """As millrace.pipelines.sinks.sink.Sink says."""
        written = Written()
        lanes: list[list[Action]] = [[] for _ in range(self._declared.requests)]
        for action in actions:
            name = action.id.encode(errors="surrogatepass")
            if not 0 < len(name) <= MAX_ID_BYTES:
                reason = f"an id has 1 to {MAX_ID_BYTES} bytes, and this one has {len(name)}"
                written.failures.append(Failure(action.record, TASK_PUT, STEP, "ID_LENGTH", reason))
            else:
                lanes[zlib.crc32(name) % len(lanes)].append(action)
        busy = [lane for lane in lanes if lane]
        if len(busy) < 2:
            done = [self._lane(lane) for lane in busy]
        else:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._declared.requests, thread_name_prefix="bulk")
            started = [self._threads.submit(self._apart, lane) for lane in busy]
            outcomes = [each.exception() or each.result() for each in started]  # all have ended, before one is raised
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            done = [outcome for outcome in outcomes if isinstance(outcome, Written)]
        for each in done:
            written.add(each)
        return written

    def close(self) -> None:
        """Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._client.close()

    def _apart(self, actions: Sequence[Action]) -> Written:
        """A lane in a thread of its own."""
        begun = time.thread_time()
        written = self._lane(actions)
        written.cpu_seconds = time.thread_time() - begun
        return written

    def _lane(self, actions: Sequence[Action]) -> Written:
        """All of a lane, bulk by bulk."""
        written = Written()
        left = deque(actions)
        pause = self._declared.backoff_ms / 1000
        since = self._clock()
        whole = 0
        """Largest bulk that may be right by size where one was refused as a whole; 0: none was."""
        while left:
            bulk = self._cut(left, whole)
            written.bulks += 1
            try:
                items = send(self._client, index_path(self._declared.index_base), bulk, refresh=self._declared.refresh)
            except TooLarge as error:
                if len(bulk) == 1:
                    written.failures.append(Failure(bulk[0].record, TASK_PUT, STEP, error.kind, str(error)))
                    since = self._clock()
                else:
                    left.extendleft(reversed(bulk))
                    whole = len(bulk) // 2
                continue
            except Busy as error:
                self._again(left, bulk, written, str(error), since, pause)
                pause = min(2 * pause, self._declared.max_backoff_ms / 1000)
                continue
            except Refused as error:
                raise SinkRefused(f"index {self._declared.index_base}: {error}") from None
            whole = 0
            again, reason = [], ""
            for action, item in zip(bulk, items, strict=True):
                match item.verdict:
                    case Verdict.DONE:
                        written.acknowledged += 1
                    case Verdict.STALE:
                        written.acknowledged += 1
                        written.stale += 1
                    case Verdict.FAILED:
                        written.failures.append(Failure(action.record, TASK_PUT, STEP, item.kind, item.reason))
                    case Verdict.AGAIN:
                        again.append(action)
                        reason = f"{item.kind}: {item.reason}"
                    case Verdict.REFUSED:
                        raise SinkRefused(f"index {self._declared.index_base}: {item.kind}: {item.reason}")
            if len(again) < len(bulk):
                since, pause = self._clock(), self._declared.backoff_ms / 1000
            if again:
                self._again(left, again, written, reason, since, pause)
                pause = min(2 * pause, self._declared.max_backoff_ms / 1000)
            else:
                self._window.grow()
        return written

    def _again(
        self, left: deque[Action], bulk: Sequence[Action], written: Written, reason: str, since: float, pause: float
    ) -> None:
        """Put `bulk` before what is left, in smaller bulks, behind a pause. Raises SinkBusy where that was long enough."""
        left.extendleft(reversed(bulk))
        written.retries += len(bulk)
        self._window.shrink()
        if self._clock() - since >= self._declared.patience_ms / 1000:
            raise SinkBusy(f"OpenSearch takes nothing: {reason}", retry_after=self._declared.max_backoff_ms / 1000)
        self._sleep(jittered(pause))

    def _cut(self, left: deque[Action], most: int) -> list[Action]:
        """The next bulk, taken from `left`: at least one action."""
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
            size -= len(action.body or b"") + len(action.id) + 64
            bulk.append(action)
        return bulk


def made(pipeline: Pipeline, settings: Settings) -> OpenSearchSink:
    """The sink of `pipeline`."""
    declared = pipeline.sink
    assert isinstance(declared, Declared), "the registry goes by kind"
    return OpenSearchSink(
        declared, flush_items=pipeline.flush.items, flush_bytes=max(1, int(pipeline.flush.mib * (1 << 20)))
    )
