"""The calls on pipelines, without HTTP: routes and commands are thin layers over them. `admit` checks permissions.

A new pipeline is STOPPED. A request is stored first and carried out afterwards; `tend` completes requests that a
crashed process left unfinished.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from millrace.access.grants import LOCAL_ADMIN, Caller, Principal
from millrace.access.permissions import Requirement, authorize
from millrace.base.closeable import Closeable
from millrace.base.errors import (
    InvalidArgument,
    InvalidSettings,
    InvalidStream,
    LogUnavailable,
    MillraceError,
    PermissionDenied,
    PipelineBusy,
    PipelineConflict,
    PipelineInvalid,
    PipelineNotFound,
    SecretUnreadable,
    SinkBusy,
    SinkRefused,
    TableUnavailable,
)
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import Problem, invalid
from millrace.flows.declare.spellings import as_written
from millrace.flows.errors.listing import SHOWN_BYTES
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.range_host.lookups import CollectionRows
from millrace.flows.range_host.observed import flow_status, with_description
from millrace.flows.range_host.status import PipelineStatus
from millrace.flows.range_host.topic_admin import BrokersLook
from millrace.flows.range_host.trend import Trend, read_trend
from millrace.flows.records import Record as TopicRecord
from millrace.flows.samples.trying import Trying
from millrace.flows.status import FlowStatus
from millrace.pipelines.api.any_flow import AnyFlow, Move
from millrace.pipelines.api.reprocessing import Reprocessing
from millrace.pipelines.api.rights import may_declare, may_look_up, retained_secrets, sees
from millrace.pipelines.declaration import as_pipeline, named, restarts_of, spelling_asked
from millrace.pipelines.deploy.airflow import by_airflow
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.reach import require_allowed
from millrace.pipelines.deploy.redriving import Redrives
from millrace.pipelines.deploy.runner import World, run
from millrace.pipelines.deploy.saga import Saga
from millrace.pipelines.deploy.world import RealWorld
from millrace.pipelines.store.records import DEFAULT_QUOTA, PAUSED, RUNNING, STOPPED, Phase, PipelineRole, Quota, Record
from millrace.pipelines.store.store import PipelineStore

if TYPE_CHECKING:
    from millrace.flows.sources.source import Source

MAX_SAMPLES: Final = 100
"""The most documents of one dry run."""
_FROM_ENVIRONMENT: Final = re.compile(r"\$\{(env|sealed|connection):")
_PATIENCE_SECONDS: Final = 60.0
"""Seconds for which another process of the service may still be creating a pipeline."""
_SERVICE: Final = "service"
"""The actor of changes that nobody requested."""
_TURNS: Final = 64
_RETRY_SECONDS: Final = 5.0
_READY_SECONDS: Final = 1.0

_log: Final = logging.getLogger(__name__)


class Management(Reprocessing, AnyFlow, Closeable):
    """The calls on pipelines. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        store: PipelineStore | Callable[[], PipelineStore],
        *,
        configuration: Configuration | None = None,
        world: World | None = None,
        deployment: Deployment | None = None,
        redrives: Redrives | None = None,
        places: Callable[[Settings, Flow], Source] | None = None,
        trying: Trying | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the management of pipelines.

        `store` may be a function that returns the open store; it is called in each call. `configuration` has the
        defaults of declarations. `world`, `deployment`, `redrives`, `places` (which returns a flow's source) and
        `trying` default to the real ones.
        """
        super().__init__(
            settings, store, deployment or Deployment(settings), redrives or Redrives(settings, clock=clock), places
        )
        self._clock = clock
        self._configuration = configuration or Configuration()
        self._world = world or RealWorld(self.deployment, self._pipeline)
        self._kafka = BrokersLook()
        self._trying = trying or Trying()
        self._moving: set[str] = set()
        """Pipelines that a call of this process is creating or deleting. `tend` skips them."""
        self._asking = threading.Lock()
        self._answered = (-math.inf, False)
        self._turns = tuple(threading.Lock() for _ in range(_TURNS))
        """Locks by the digest of an id: one thread at a time starts or stops a worker, by the wanted state at that
        time."""

    def close(self) -> None:
        """Close the sandbox for steps. Idempotent. The store stays open, since the caller owns it."""
        self._trying.close()

    def admit(self, calls: Mapping[str, Requirement], caller: Caller, call: str, request: Mapping[str, Any]) -> Caller:
        """Return the caller with their roles on pipelines if they may make this call.

        Raises PermissionDenied, or PipelineNotFound if they may not know whether the pipeline exists.
        """
        caller.require_valid()
        caller = self.known(caller)
        name = request.get("pipeline")
        try:
            authorize(caller, call, request, calls=calls)
        except PermissionDenied:
            if isinstance(name, str) and not sees(caller, name):
                raise PipelineNotFound(f"no pipeline {name[:100]!r}") from None
            raise
        return caller

    def known(self, caller: Caller) -> Caller:
        """Return the caller with their roles on pipelines. The local administrator's name has no such roles."""
        name = caller.principal.name
        own = () if name == LOCAL_ADMIN.principal.name else self._store.grants_of(name)
        return Caller(Principal(name, (*caller.principal.grants, *own)), caller.key, caller.is_valid)

    # --- to make, change, and look -----------------------------------------------------------------------------------

    def check(self, pipeline: str, declared: Any) -> Flow:
        """Validate a declaration as `create` would, or `update` if the pipeline exists. Raises PipelineInvalid."""
        try:
            was = self._pipeline(self._store.get(pipeline))
        except PipelineNotFound:
            was = None
            self._require_free(pipeline)
        return self.validate(pipeline, declared, was=was)

    def _require_free(self, pipeline: str) -> None:
        """Raise PipelineInvalid if a declared flow has that name, since lists and metrics would merge the two."""
        try:
            taken = pipeline in declared_flows(self._settings)
        except InvalidStream as error:  # an operator must fix it; `flows check` shows it
            _log.warning("declared flows cannot be read: %s", error)
            return
        if taken:
            raise invalid([Problem("id", f"a declared flow is named {pipeline!r}: choose another name", "taken")])

    def validate(self, pipeline: str, declared: Any, *, was: Flow | None = None) -> Flow:
        """Return the pipeline that `declared` describes, in either form, with the service's defaults; create nothing.

        Secrets that `declared` omits are taken from `was` if they remain valid. Raises PipelineInvalid, TooMuchWork,
        ServiceBusy.
        """
        if not isinstance(declared, dict):
            raise invalid([Problem("", "is an object with source and sink", "type")])
        declared = named(pipeline, declared)
        _check_environment(declared, "")
        whole = self._configuration.with_defaults(declared)
        made = self._parsed(whole, None if was is None else retained_secrets(was, whole))
        if (unordered := made.unordered()) is not None and (was is None or was.unordered() is None):
            raise invalid([unordered])
        require_allowed(made, self._configuration.reach)
        return made

    def _parsed(self, whole: dict[str, Any], secrets: Mapping[str, str] | None) -> Flow:
        """Parse a declaration and report all problems. The user's expressions are compiled in a sandbox."""
        spelling = spelling_asked(whole)
        transform = whole.get("transform")
        steps = transform.get("steps") if isinstance(transform, dict) else transform
        compiled = self._trying.problems(whole.get("steps") if spelling == "pipeline" else steps)
        if spelling == "flow":
            compiled = [each._replace(field=as_written(f"transform.{each.field}", whole, "flow")) for each in compiled]
        try:
            made = Flow.parse(whole, spelling=spelling, secrets=secrets, compiled=False)
        except PipelineInvalid as error:
            known = [Problem(**each) for each in error.problems]
            raise invalid([*known, *(each for each in compiled if each not in known)]) from None
        if compiled:
            raise invalid(compiled)
        return made

    def create(self, caller: Caller, pipeline: str, declared: Any) -> Record:
        """Create a pipeline, STOPPED, with everything that it needs, or nothing at all.

        Raises PipelineInvalid, PipelineExists, PermissionDenied (a collection, another user's account), QuotaExceeded,
        and the error of a step that failed.
        """
        who = caller.principal.name
        self._require_free(pipeline)
        checked = self.validate(pipeline, declared)
        if not checked.account:
            checked = checked.model_copy(update={"account": who})
        may_declare(caller, checked)
        self._moving.add(pipeline)
        try:
            record = self._store.create(
                as_pipeline(checked), secrets=checked.secrets(), who=who, saga=Saga(who=who).to_json()
            )
        except BaseException:
            self._moving.discard(pipeline)
            raise
        made = self._run(record)
        if made is None:
            (last,) = self._store.events(pipeline, limit=1)
            raise _not_made(pipeline, str(last.detail.get("code")), str(last.detail.get("cause")))
        return made

    def get(self, pipeline: str) -> Record:
        """Raises PipelineNotFound."""
        return self._store.get(pipeline)

    def seen_by(self, caller: Caller) -> list[Record]:
        """Return the pipelines that the caller may see, by id."""
        return [record for record in self._store.all() if sees(caller, record.id)]

    def update(self, caller: Caller, pipeline: str, declared: Any, *, version: int) -> tuple[Record, list[str]]:
        """Replace the declaration of `version`; return the fields for which a running worker was restarted.

        Omitted secrets stay, unless the address that they are sent to changes. Raises PipelineInvalid,
        PipelineConflict, PipelineBusy, PermissionDenied, QuotaExceeded.
        """
        record = self._ready(pipeline)
        was = self._pipeline(record)
        asked = self.validate(pipeline, declared, was=was)
        asked = asked if asked.account else asked.model_copy(update={"account": was.account})
        may_declare(caller, asked, was=was)
        restarts = restarts_of(was, asked)
        changed = self._store.update(
            pipeline,
            as_pipeline(asked),
            version=version,
            secrets=asked.secrets(),
            who=caller.principal.name,
            detail={"restarts": restarts},
        )
        with self._turn(pipeline):
            self.deployment.write(asked)
            if restarts and changed.wanted != STOPPED:
                self.deployment.stop(pipeline)
        self._align(pipeline, asked=True)
        return changed, restarts

    def delete(self, caller: Caller, pipeline: str, *, force: bool = False) -> None:
        """Delete the pipeline with everything that was created for it, including its topics and index.

        With `force`, whatever cannot be removed now stays, and the history records it. Raises PipelineBusy unless it is
        stopped and complete, and the error of a step that cannot be undone.
        """
        record = self._store.get(pipeline)
        if record.phase is Phase.READY:
            if record.wanted != STOPPED or self.deployment.running(pipeline):
                raise PipelineBusy(f"{pipeline!r} is {record.wanted}: stop it, then delete it")
            self.redrives.cancel(pipeline)
            saga = Saga.from_json(record.saga).deleting(caller.principal.name)
            who = caller.principal.name
            record = self._store.move(record, phase=Phase.DELETING, saga=saga.to_json(), who=who, what="delete")
            self._moving.add(pipeline)
        elif record.phase is Phase.CREATING:
            saga = Saga.from_json(record.saga)
            young = self._clock() - record.created_at <= _PATIENCE_SECONDS
            if pipeline in self._moving or (young and not (saga.back or force)):
                raise PipelineBusy(f"{pipeline!r} is being created: wait for up to {_PATIENCE_SECONDS:.0f} s")
            if not saga.back:
                who = caller.principal.name
                back = saga.deleting(who).to_json()
                record = self._store.move(record, phase=Phase.DELETING, saga=back, who=who, what="delete")
        self._run(record, leave=force)

    def _run(self, record: Record, *, leave: bool = False) -> Record | None:
        try:
            return run(self._store, record, self._world, leave=leave)
        finally:
            self._moving.discard(record.id)

    def clone(self, caller: Caller, pipeline: str, to: str, changes: Mapping[str, Any]) -> Record:
        """Create another pipeline from the declaration with `changes`, in the caller's account and without secrets."""
        declared = {**self._store.get(pipeline).declaration, **changes, "id": to}
        if "account" not in changes:
            declared.pop("account", None)
        made = self.create(caller, to, declared)
        self._store.note(to, who=caller.principal.name, what="clone", of=pipeline)
        return made

    # --- to run ------------------------------------------------------------------------------------------------------

    def status(self, pipeline: str) -> PipelineStatus:
        """Return the status that the pipeline's worker reported."""
        self._store.get(pipeline)
        return self.deployment.status(pipeline)

    def flow(self, record: Record, status: PipelineStatus) -> FlowStatus:
        """Return the status of `record` in the form for all flows; `status` is the result of `status`."""
        found = flow_status(self._settings, record.id, status)
        if found.reads:
            return found
        return with_description(found, self._pipeline(record))  # it was created, but never deployed

    def managed_status(self, record: Record) -> FlowStatus:
        """Return the status of `record` in the form for all flows."""
        return self.flow(record, self.status(record.id))

    def move_managed(self, caller: Caller, pipeline: str, move: Move) -> None:
        """Resume, pause or stop a pipeline."""
        {"resume": self.resume, "pause": self.pause, "stop": self.stop}[move](caller, pipeline)

    def trend(self, pipeline: str) -> Trend:
        """Return the rates of the last quarter of an hour, from samples of its worker."""
        self._store.get(pipeline)
        return read_trend(self._settings, pipeline, now=self._clock())

    def resume(self, caller: Caller, pipeline: str) -> Record:
        """Run a pipeline: start its worker if it does not run."""
        self._ready(pipeline)
        record = self._store.want(pipeline, RUNNING, who=caller.principal.name, what="resume")
        self._align(pipeline, asked=True)
        return record

    def pause(self, caller: Caller, pipeline: str) -> Record:
        """Pause a pipeline: its worker runs and reads nothing. Raises PipelineBusy if it is stopped."""
        if self._ready(pipeline).wanted == STOPPED:
            raise PipelineBusy(f"{pipeline!r} is STOPPED: resume it first")
        record = self._store.want(pipeline, PAUSED, who=caller.principal.name, what="pause")
        self._align(pipeline, asked=True)
        return record

    def stop(self, caller: Caller, pipeline: str) -> Record:
        """Stop a pipeline's worker between two micro-batches. No effect if it is stopped."""
        self._ready(pipeline)
        record = self._store.want(pipeline, STOPPED, who=caller.principal.name, what="stop")
        self._align(pipeline, asked=True)
        return record

    def restart(self, caller: Caller, pipeline: str, *, only_failed: bool) -> Record:
        """Restart all tasks, or only those that failed. Raises PipelineBusy if the pipeline is stopped."""
        record = self._ready(pipeline)
        if record.wanted == STOPPED:
            raise PipelineBusy(f"{pipeline!r} is STOPPED: resume it")
        self._store.note(pipeline, who=caller.principal.name, what="restart", only_failed=only_failed)
        self.deployment.ask(pipeline, restart="failed" if only_failed else "all")
        self._align(pipeline, asked=True)
        return record

    def tend(self) -> None:
        """Complete unfinished work: sagas of a crashed process, workers in the wrong state. Call it periodically.

        An error of one pipeline is logged and does not affect the others.
        """
        records = self._store.all()
        for record in records:
            if record.phase is Phase.READY:
                _tended(record.id, partial(self._align, record.id))
                _tended(record.id, partial(self.redrives.tend, record.id))
                _tended(record.id, partial(self.note_redrive, record))
        for record in records:
            if (
                record.phase is not Phase.READY
                and record.id not in self._moving
                and self._clock() - record.created_at > _PATIENCE_SECONDS
            ):
                _tended(record.id, partial(run, self._store, record, self._world))

    def _align(self, pipeline: str, *, asked: bool = False) -> None:
        """Bring the worker into the wanted state. A worker that failed for good is restarted only if `asked`."""
        with self._turn(pipeline):
            record = self._store.get(pipeline)
            if record.phase is not Phase.READY:
                return
            runs = self.deployment.running(pipeline)
            if record.wanted == STOPPED:
                if runs:
                    self.deployment.stop(pipeline)
                return
            self.deployment.ask(pipeline, paused=record.wanted == PAUSED)
            if by_airflow(record):  # its DAG starts the worker, by the wanted state in the store
                self.deployment.write(self._pipeline(record))
                return
            if runs or (not asked and self.deployment.gave_up(pipeline)):
                return
            if not asked:
                self._store.note(pipeline, who=_SERVICE, what="start", cause="its worker did not run")
            self.deployment.write(self._pipeline(record))
            self.deployment.start(pipeline)

    def _turn(self, pipeline: str) -> threading.Lock:
        return self._turns[crc32(pipeline.encode()) % _TURNS]

    # --- samples -----------------------------------------------------------------------------------------------------

    def dry_run(
        self,
        caller: Caller,
        pipeline: str,
        documents: list[Any],
        declared: Any = None,
        *,
        keys: Sequence[str] = (),
        newest: int = 0,
    ) -> list[dict[str, Any]]:
        """Return the result of each step for sample documents, by the stored pipeline or by `declared`. Writes nothing.

        `keys` are the keys of their records, in order; the default is ``sample-0`` and so on. The `newest` records of
        the stored pipeline's topics follow, whatever is declared. Lookups read collections, which the caller must be
        allowed to read.

        Raises PipelineInvalid, PermissionDenied, LogUnavailable, ChannelNotFound, TooMuchWork, ServiceBusy.
        """
        import msgspec

        from millrace.flows.range_host.newest import newest_records

        if len(documents) > MAX_SAMPLES:
            raise InvalidArgument(f"a dry run has at most {MAX_SAMPLES} documents, not {len(documents)}")
        known = self._store.get(pipeline)
        own = self._pipeline(known)
        made = own if declared is None else self.validate(pipeline, declared)
        may_look_up(caller, made)
        records = []
        for place, document in enumerate(documents):
            key = keys[place] if place < len(keys) else f"sample-{place}"
            try:
                value = None if document is None else msgspec.json.encode(document)
                records.append(TopicRecord("sample", 0, place, key.encode(), value, 0))
            except (ValueError, OverflowError, RecursionError) as error:
                raise InvalidArgument(f"document {place} cannot be a record's value: {str(error)[:200]}") from None
        records += newest_records(own, newest) if newest else []
        samples = self._trying.show(made, records, partial(CollectionRows, self._settings))
        found = []
        for record, sample in zip(records, samples, strict=True):
            text = None if record.value is None else record.value[:SHOWN_BYTES].decode(errors="replace")
            found.append({**sample, "place": record.position, "value": text})
        return found

    # --- people ------------------------------------------------------------------------------------------------------

    def roles(self, pipeline: str) -> dict[str, PipelineRole]:
        return self._store.roles(pipeline)

    def set_role(
        self, caller: Caller, pipeline: str, principal: str, role: PipelineRole | None
    ) -> dict[str, PipelineRole]:
        return self._store.set_role(pipeline, principal, role, who=caller.principal.name)

    def history(self, pipeline: str, *, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Newest first."""
        self._store.get(pipeline)
        return [asdict(event) for event in self._store.events(pipeline, before=before, limit=limit)]

    def audit(self, *, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return the changes of all pipelines, also of deleted ones, and of quotas and keys, newest first."""
        return [asdict(event) for event in self._store.events(None, before=before, limit=limit)]

    def quotas(self) -> list[tuple[Quota, Quota]]:
        """Return quota and usage of each account with pipelines or a quota; the account ``*`` is for all others."""
        known, used = {each.account: each for each in self._store.quotas()}, self._store.used()
        others = known.get("*", DEFAULT_QUOTA)
        names = sorted({"*", *known, *used})
        return [
            (replace(known.get(name, others), account=name), used.get(name, Quota(name, 0, 0.0, 0))) for name in names
        ]

    def set_quota(self, caller: Caller, quota: Quota) -> None:
        self._store.set_quota(quota, who=caller.principal.name)

    def drop_quota(self, caller: Caller, account: str) -> None:
        self._store.drop_quota(account, who=caller.principal.name)

    def secret_names(self, pipeline: str) -> list[str]:
        return self._store.secret_names(pipeline)

    def dependencies(self) -> dict[str, str]:
        """Return the state of the service's dependencies: ``ok`` or the problem. Checks Kafka if `mq` names brokers."""
        try:
            found = {"store": "ok", "pipelines": str(len(self._store.all()))}
        except MillraceError as error:
            found = {"store": error.code}
        if brokers := self._configuration.brokers():
            found["kafka"] = self._kafka.look(KafkaCluster.model_validate(brokers))
        return found

    def ready(self) -> bool:
        """Return whether the store responds, checked at most once a second, since anybody may call this."""
        with self._asking:
            at, said = self._answered
            if time.monotonic() - at > _READY_SECONDS:
                try:
                    self._store.ping()
                    said = True
                except MillraceError:
                    said = False
                self._answered = (time.monotonic(), said)
            return said

    def metrics(self) -> bytes:
        """Return, for each pipeline that should run, whether it has a worker. Raises MetaUnavailable.

        The workers export their own metrics.
        """
        metrics = Metrics()
        for record in self._store.all():
            if record.phase is Phase.READY and record.wanted != STOPPED:
                metrics.flow_running.labels(record.id, "range").set(self.deployment.running(record.id))
        return metrics.render()


def _tended(pipeline: str, do: Callable[[], object]) -> None:
    try:
        do()
    except (PipelineConflict, PipelineNotFound):
        pass  # another process or call is doing it
    except MillraceError as error:
        _log.warning("%s: %s: %s", pipeline, error.code, error)
    except Exception:
        _log.exception("%s cannot be tended; this is retried", pipeline)


def _not_made(pipeline: str, code: str, cause: str) -> MillraceError:
    """Return the error that prevented a pipeline's creation, as an error of its kind."""
    words = f"{pipeline!r} was not created, and everything was undone: {cause}"
    if code == SinkBusy.code:
        return SinkBusy(words, retry_after=_RETRY_SECONDS)
    kinds = (LogUnavailable, SinkRefused, InvalidSettings, SecretUnreadable, TableUnavailable)
    return next((kind(words) for kind in kinds if kind.code == code), InvalidArgument(words))


def _check_environment(value: Any, path: str) -> None:
    """Raise PipelineInvalid for references to the worker's environment, which only the operator's files may contain."""
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and _FROM_ENVIRONMENT.search(value):
            raise PipelineInvalid(
                f"{path}: ${{env:…}} and ${{connection:…}} are for declarations in files on the service's machine",
                problems=[Problem(path, "takes no ${env:…} through the API", "environment")._asdict()],
            )
        if isinstance(value, dict):
            waiting += [(f"{path}.{name}".lstrip("."), each) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}.{place}", each) for place, each in enumerate(value)]
