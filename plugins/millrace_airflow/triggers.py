"""Triggers, which wait in the triggerer without a worker slot.

They read files and tables of the data folder in a thread, never in the event loop, and can be recreated from their
arguments anywhere, so a restarted triggerer continues. Settings are those of the triggerer's process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

from millrace_airflow.hooks import load_settings

if TYPE_CHECKING:
    from millrace.base.settings import Settings

SETTLE_SECONDS: Final = 5.0
"""Shortest time between a trigger's start and its event.

Airflow 3.3 mistakes a task that resumes before its scheduler knows that it deferred for one that was killed from
outside, and uses up one of its tries (apache/airflow#67287, #72716).
"""


async def _settled(began: float) -> None:
    """Wait until a trigger that began at `began` (monotonic) may send its event."""
    await asyncio.sleep(max(0.0, began + SETTLE_SECONDS - time.monotonic()))


class JobTrigger(BaseTrigger):
    """Waits for a launched run to end; shows its progress in the task's log; stops it when the task is killed or too
    late.

    The event is ``{"run_id", "state", "late"}``; what the run left (report, error) is read by the task from its folder.
    """

    def __init__(
        self, *, run_id: str, data_dir: str | None = None, poll_seconds: float = 1.0, stop_at: float | None = None
    ) -> None:
        """`stop_at` is the Unix time at which the run is stopped."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.run_id = run_id
        self.data_dir = data_dir
        self.poll_seconds = poll_seconds
        self.stop_at = stop_at

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "run_id": self.run_id,
                "data_dir": self.data_dir,
                "poll_seconds": self.poll_seconds,
                "stop_at": self.stop_at,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from millrace.client.progress import operation_words
        from millrace.runtime.launch.launcher import Launcher

        launcher = Launcher(load_settings(self.data_dir))
        began = time.monotonic()
        said, late = None, False
        while (status := await asyncio.to_thread(launcher.poll, self.run_id)).active:
            progress = status.progress or {}
            if progress.get("words") and progress.get("words") != said:
                said = progress["words"]
                self.log.info("%s %s", operation_words(progress), progress.get("figures") or "")
            if self.stop_at is not None and time.time() > self.stop_at:
                late = True
                await asyncio.to_thread(launcher.stop, self.run_id)
                continue
            await asyncio.sleep(self.poll_seconds)
        await _settled(began)
        yield TriggerEvent({"run_id": self.run_id, "state": str(status.state), "late": late})

    async def on_kill(self) -> None:
        """Stop the job, since its task was marked failed or succeeded, or cleared."""
        from millrace.runtime.launch.launcher import Launcher

        await asyncio.to_thread(Launcher(load_settings(self.data_dir)).stop, self.run_id)


class ConditionTrigger(BaseTrigger):
    """Waits until a condition of :mod:`millrace_airflow.conditions` holds; the event has the condition's findings.

    It waits through transient errors (the log server is unavailable); any other error ends the wait with ``{"error":
    ...}``.
    """

    def __init__(
        self,
        *,
        condition: str,
        arguments: dict[str, Any],
        data_dir: str | None = None,
        poll_seconds: float = 5.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.condition = condition
        self.arguments = arguments
        self.data_dir = data_dir
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "condition": self.condition,
                "arguments": self.arguments,
                "data_dir": self.data_dir,
                "poll_seconds": self.poll_seconds,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from millrace.base.errors import MillraceError
        from millrace_airflow.conditions import check

        settings = load_settings(self.data_dir)
        began = time.monotonic()
        said = None
        while True:
            try:
                answer = await asyncio.to_thread(check, self.condition, settings, self.arguments)
            except MillraceError as error:
                if not error.retriable:
                    await _settled(began)
                    yield TriggerEvent({"error": {"code": error.code, "message": str(error)}})
                    return
                words = f"{error.code}: {error}"
            else:
                if answer.met:
                    await _settled(began)
                    yield TriggerEvent({"found": answer.found})
                    return
                words = answer.words
            if words != said:
                said = words
                self.log.info("%s", words)
            await asyncio.sleep(self.poll_seconds)


class SegmentsFlushedTrigger(BaseEventTrigger):
    """Sends an event whenever the flusher has completed more segments than at the last check.

    It reads the flusher's progress file, which names the segments with their ticks. The reported ticks are stored with
    the asset in Airflow, so a restarted triggerer reports no segment twice and none that the file still names is lost.
    """

    def __init__(
        self, *, data_dir: str | None = None, collection_id: int | None = None, poll_seconds: float = 2.0
    ) -> None:
        """With `collection_id`, report only the segments of this collection."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.data_dir = data_dir
        self.collection_id = collection_id
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {"data_dir": self.data_dir, "collection_id": self.collection_id, "poll_seconds": self.poll_seconds},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        settings = load_settings(self.data_dir)
        reported = await self._reported()
        while True:
            found = await asyncio.to_thread(read_flushed_segments, settings)
            fresh = new_segments(found, reported, collection_id=self.collection_id)
            if reported is None:  # the first check ever: segments flushed before it are not reported
                reported = {each["pchannel"]: each["time_tick"] for each in found}
                await self._store(reported)
            elif fresh:
                reported = reported | {each["pchannel"]: each["time_tick"] for each in found}
                yield TriggerEvent(_event(fresh))
                await self._store(reported)
            await asyncio.sleep(self.poll_seconds)

    async def _reported(self) -> dict[str, int] | None:
        store = self.asset_state_store
        stored = await store.aget("told") if store is not None else None
        return {name: int(str(tick)) for name, tick in stored.items()} if isinstance(stored, dict) else None

    async def _store(self, reported: dict[str, int]) -> None:
        if self.asset_state_store is not None:
            await self.asset_state_store.aset("told", dict(reported))


def _event(fresh: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "segments": [each["segment_id"] for each in fresh],
        "collections": sorted({each["collection_id"] for each in fresh}),
        "rows": sum(each["rows"] for each in fresh),
        "time_tick": max(each["time_tick"] for each in fresh),
    }


def read_flushed_segments(settings: Settings) -> list[dict[str, Any]]:
    """Return the newest flushed segments in the progress file, or in those of a cluster's nodes.

    Each has pchannel, collection_id, segment_id, rows and time_tick.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    # Written by millrace.node.flush.flushed_segments, whose import needs Arrow; reading the file does not.
    name = "flushed-segments.json"
    for path in (settings.run_path / name, *sorted((settings.run_path / "nodes").glob(f"*/{name}"))):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        found |= {(each["pchannel"], each["segment_id"]): each for each in value.get("segments", [])}
    return list(found.values())


def new_segments(
    found: list[dict[str, Any]], reported: Mapping[str, int] | None, *, collection_id: int | None = None
) -> list[dict[str, Any]]:
    """Return the segments of `found` after the `reported` ticks, oldest first; none at the first check (None)."""
    if reported is None:
        return []
    fresh = [each for each in found if each["time_tick"] > reported.get(each["pchannel"], 0)]
    if collection_id is not None:
        fresh = [each for each in fresh if each["collection_id"] == collection_id]
    return sorted(fresh, key=lambda each: (each["time_tick"], each["segment_id"]))
