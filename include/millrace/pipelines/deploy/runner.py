"""Run a saga against the world. Each step is stored before the next, so that a successor resumes after a crash."""

from __future__ import annotations

import logging
from typing import Final, Protocol

from millrace.base.errors import MillraceError, PipelineBusy, PipelineConflict, PipelineNotFound
from millrace.base.failpoint import hit
from millrace.pipelines.deploy.saga import Do, Saga
from millrace.pipelines.store.records import Phase, Record
from millrace.pipelines.store.store import PipelineStore

_log: Final = logging.getLogger(__name__)


class World(Protocol):
    """The actions of steps. Each call may be repeated without further effect. Raises MillraceError."""

    def plan(self, step: str, record: Record) -> tuple[str, ...]:
        """Return what the step would create, because it does not exist. Changes nothing."""
        ...

    def make(self, step: str, record: Record, things: tuple[str, ...]) -> None: ...

    def undo(self, step: str, record: Record, things: tuple[str, ...]) -> tuple[str, ...]:
        """Remove those of `things` that exist, and nothing else; return those that it cannot reach and leaves."""
        ...


def run(store: PipelineStore, record: Record, world: World, *, leave: bool = False) -> Record | None:
    """Run the saga to its end; return the pipeline READY, or None if it was removed. A failed step undoes the others.

    A failed undo raises, and the next call repeats it. With `leave`, what it would have undone stays, and the history
    records it. Raises PipelineConflict if another process has continued the saga, and PipelineBusy for an undo that
    fails unexpectedly.
    """
    while True:
        saga = Saga.from_json(record.saga)
        do = saga.next()
        if do == "ready":
            return store.move(record, phase=Phase.READY, saga=record.saga, who=record.created_by, what="created")
        if not isinstance(do, Do):
            what = "create failed" if record.phase is Phase.CREATING else "deleted"
            store.remove(record, who=saga.who or record.created_by, what=what, cause=saga.cause, code=saga.code)
            return None
        hit(f"saga.{do.what}.{do.step}")
        left: tuple[str, ...] = ()
        try:
            behind, left = _do(world, do, record, saga)
        except (PipelineConflict, PipelineNotFound):
            raise
        except Exception as error:  # also errors of libraries: nobody could delete a partly created pipeline
            code, cause = _failure_of(error, record, do)
            if not saga.back:
                behind = saga.failed(code, cause)
            elif leave:
                behind, left = saga.done(), do.things or (do.step,)
            elif isinstance(error, MillraceError):
                raise
            else:
                raise PipelineBusy(
                    f"{record.id!r}: cannot undo {do.step} ({cause}): fix it and delete again, or delete with force"
                ) from error
        hit(f"saga.{do.what}.{do.step}.done")
        record = store.move(record, phase=record.phase, saga=behind.to_json())
        if left:
            store.note(record.id, who=saga.who or record.created_by, what="left", things=list(left))


def _failure_of(error: Exception, record: Record, do: Do) -> tuple[str, str]:
    """Return code and text of the error that ended a step."""
    if isinstance(error, MillraceError):
        return error.code, str(error)
    _log.error("%s: %s of %s", record.id, do.what, do.step, exc_info=error)
    return "INTERNAL", f"{do.step}: {type(error).__name__}: {error}"


def _do(world: World, do: Do, record: Record, saga: Saga) -> tuple[Saga, tuple[str, ...]]:
    """Execute the next action; return the saga after it, and the things that an undo leaves."""
    if do.what == "plan":
        return saga.done(world.plan(do.step, record)), ()
    left: tuple[str, ...] = ()
    if do.what == "make":
        world.make(do.step, record, do.things)
    else:
        left = world.undo(do.step, record, do.things)
    return saga.done(), left
