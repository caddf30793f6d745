"""The calls on records that were already read or are to be read again: offsets, failures, their redrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from millrace.access.grants import Caller
from millrace.base.errors import PipelineBusy, TableNotFound
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.message.ids import resolve_tick
from millrace.pipelines.declaration import pipeline_of
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.redriving import Redrives, RedriveState, RedriveStatus
from millrace.pipelines.store.records import STOPPED, Phase, Record
from millrace.pipelines.store.store import MAX_EVENTS, PipelineStore

if TYPE_CHECKING:
    from millrace.flows.errors.listing import ErrorPage
    from millrace.flows.errors.selection import Selection
    from millrace.flows.sources.source import Source


_OVER: Final = frozenset({RedriveState.DONE, RedriveState.FAILED, RedriveState.CANCELLED})
_ENDED: Final = "redrive ended"


class Reprocessing:
    """Calls on offsets, dead letters and redrives, and the base of all calls. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        store: PipelineStore | Callable[[], PipelineStore],
        deployment: Deployment,
        redrives: Redrives,
        places: Callable[[Settings, Flow], Source] | None,
    ) -> None:
        self._settings, self._given, self._places = settings, store, places
        self.deployment, self.redrives = deployment, redrives
        self._noted: dict[str, str] = {}
        """By pipeline, the redrive whose end is in the history."""

    @property
    def _store(self) -> PipelineStore:
        return self._given if isinstance(self._given, PipelineStore) else self._given()

    def offsets(self, pipeline: str) -> dict[str, int]:
        """Return the next offset of each task that has one."""
        from millrace.flows.range_host.positions import positions_of

        self._store.get(pipeline)
        try:
            return {task: found.position for task, found in positions_of(self._settings, pipeline).items()}
        except TableNotFound:
            return {}

    def change_offsets(self, caller: Caller, pipeline: str, offsets: Mapping[str, int]) -> dict[str, int]:
        """Set the next offset of tasks. Raises PipelineBusy unless it is stopped, InvalidArgument for unknown tasks."""
        from millrace.flows.range_host.offsets import require_tasks, set_offsets

        require_tasks(self._pipeline(self._stopped(pipeline)), offsets)
        self._store.note(pipeline, who=caller.principal.name, what="offsets", offsets=dict(offsets))
        return set_offsets(self._settings, pipeline, offsets)

    def reset_offsets(self, caller: Caller, pipeline: str, to: str = "earliest") -> dict[str, int]:
        """Reset every task to ``earliest``, ``latest``, or the first record of a moment (ISO 8601, or a time tick).

        Raises PipelineBusy unless it is stopped, LogUnavailable, InvalidArgument.
        """
        from millrace.flows.range_host.offsets import offsets_at, set_offsets

        if to not in ("earliest", "latest"):
            resolve_tick(to)
        declared = self._pipeline(self._stopped(pipeline))
        offsets = offsets_at(self._settings, declared, to, places=self._places)
        self._store.note(pipeline, who=caller.principal.name, what="offsets", reset=to, offsets=offsets)
        return set_offsets(self._settings, pipeline, offsets)

    def errors(self, pipeline: str, selection: Selection, *, before: str = "", limit: int = 50) -> ErrorPage:
        """Return a page of the error topic, newest first. Raises LogUnavailable, ChannelNotFound, InvalidArgument."""
        from millrace.flows.errors.listing import error_page

        return error_page(self._settings, self._pipeline(self._ready(pipeline)), selection, before=before, limit=limit)

    def redrive(
        self, caller: Caller, pipeline: str, selection: Selection, *, again: bool = False, dry_run: bool = False
    ) -> RedriveStatus:
        """Start to send the error topic through the pipeline again. Raises PipelineBusy while a redrive runs."""
        self.deployment.write(self._pipeline(self._ready(pipeline)))
        who, chosen = caller.principal.name, selection.to_json()
        found = self.redrives.start(pipeline, who=who, selection=chosen, again=again, dry_run=dry_run)
        self._store.note(pipeline, who=who, what="redrive", selection=chosen, again=again, dry_run=dry_run)
        return found

    def redrive_status(self, pipeline: str) -> RedriveStatus:
        """Return the status of the pipeline's newest redrive."""
        record, found = self._store.get(pipeline), self.redrives.status(pipeline)
        if (
            found.state is RedriveState.NONE or found.asked_at < record.created_at
        ):  # it belongs to a deleted pipeline of this name
            ended = self._ended_redrive(record)
            return RedriveStatus(pipeline=pipeline, state=RedriveState.NONE) if ended is None else ended
        return found

    def note_redrive(self, record: Record) -> None:
        """Record the end of the newest redrive in the history, once: its run's folder is removed after some time."""
        found = self.redrives.status(record.id)
        if found.state in _OVER and found.asked_at >= record.created_at and self._noted.get(record.id) != found.id:
            ended = self._ended_redrive(record)
            if ended is None or ended.id != found.id:
                self._store.note(record.id, who=found.asked_by, what=_ENDED, redrive=found.model_dump(mode="json"))
            self._noted[record.id] = found.id

    def _ended_redrive(self, record: Record) -> RedriveStatus | None:
        ends = [each for each in self._store.events(record.id, limit=MAX_EVENTS) if each.what == _ENDED]
        newest = next((each for each in ends if each.at >= record.created_at), None)
        return None if newest is None else RedriveStatus.model_validate(newest.detail["redrive"])

    def cancel_redrive(self, caller: Caller, pipeline: str) -> RedriveStatus:
        """Cancel the redrive between two batches. Completed batches remain."""
        self._ready(pipeline)
        self._store.note(pipeline, who=caller.principal.name, what="cancel redrive")
        return self.redrives.cancel(pipeline)

    def _ready(self, pipeline: str) -> Record:
        record = self._store.get(pipeline)
        if record.phase is not Phase.READY:
            raise PipelineBusy(f"{pipeline!r} is {record.phase}")
        return record

    def _stopped(self, pipeline: str) -> Record:
        record = self._ready(pipeline)
        if record.wanted != STOPPED or self.deployment.running(pipeline):
            raise PipelineBusy(f"{pipeline!r} is {record.wanted}: stop it before you change offsets")
        from millrace.flows.range_host.offsets import require_no_members

        require_no_members(self._settings, self._pipeline(record))
        return record

    def _pipeline(self, record: Record) -> Flow:
        # The steps were compiled at the declaration, and the worker compiles them again. Not here, since that may take
        # long.
        return pipeline_of(record.declaration, secrets=self._store.secrets(record.id), compiled=False)
