"""The HTTP routes of the calls, in Kafka Connect's vocabulary, with the permission that each needs.

Calls that change something are PUT or DELETE, since a browser never sends these for a page of another site.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from millrace.access.grants import Caller, ResourceKind, Role
from millrace.access.permissions import Requirement, Scope
from millrace.base.errors import InvalidArgument
from millrace.base.package import VERSION
from millrace.flows.errors.listing import ErrorPage
from millrace.flows.errors.selection import MAX_IDS, Selection
from millrace.flows.range_host.status import PipelineStatus
from millrace.flows.range_host.trend import Trend
from millrace.flows.registry import kinds_listed, sink_kinds, source_kinds
from millrace.flows.status import FlowState, FlowStatus
from millrace.pipelines.api.any_flow import FlowErrors, FlowRedriven, FlowView
from millrace.pipelines.api.management import MAX_SAMPLES, Management
from millrace.pipelines.declaration import as_pipeline
from millrace.pipelines.deploy.redriving import RedriveStatus
from millrace.pipelines.store.records import Phase, PipelineRole, Quota, Record

SERVICE: Final = "millrace-pipelines"
_MOST: Final = (1 << 63) - 1
"""The largest position."""


def _over(role: Role, words: str) -> Requirement:
    return Requirement((role,), ResourceKind.PIPELINE, "pipeline", words)


CALLS: Final[Mapping[str, Requirement]] = {
    "pipelines_health": Requirement(
        (Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the pipeline service and the servers that it needs"
    ),
    "pipelines_audit": Requirement(
        (Role.READ,), Scope.EVERYTHING, description="the changes of all pipelines, quotas and keys"
    ),
    "pipelines_quotas": Requirement((Role.READ,), Scope.EVERYTHING, description="quota and usage of each account"),
    "set_quota": Requirement((Role.ADMIN,), Scope.EVERYTHING, description="set the quota of an account"),
    "drop_quota": Requirement((Role.ADMIN,), Scope.EVERYTHING, description="remove an account's own quota"),
    "pipelines_kinds": Requirement(
        (Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the kinds of sources and sinks that are installed"
    ),
    "pipelines": Requirement((Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the pipelines that one may read"),
    "create_pipeline": _over(Role.OPERATE, "create a pipeline, and become its owner"),
    "validate_pipeline": _over(Role.OPERATE, "check a declaration without creating anything"),
    "pipeline": _over(Role.READ, "one pipeline, without its secrets"),
    "flows": Requirement(
        (Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the flows that one may read, on either host"
    ),
    "flow": _over(Role.READ, "one flow: its declaration without secrets, status, guarantee, lanes and positions"),
    "resume_flow": _over(Role.OPERATE, "run a flow; a stream needs operate on everything"),
    "pause_flow": _over(Role.OPERATE, "pause a flow; a stream needs operate on everything"),
    "stop_flow": _over(Role.OPERATE, "stop a flow's processes; a stream needs operate on everything"),
    "flow_errors": _over(Role.READ, "a flow's dead letters; those of a stream need read on everything"),
    "redrive_flow": _over(Role.OPERATE, "send a stream's dead letters again; needs operate on everything"),
    "reset_flow_errors": _over(Role.OPERATE, "reset a flow's count of failed records; a stream: on everything"),
    "update_pipeline": _over(Role.OPERATE, "change a pipeline's declaration"),
    "delete_pipeline": _over(Role.ADMIN, "delete a pipeline, and everything that was created for it"),
    "pipeline_status": _over(Role.READ, "the status of a pipeline and its tasks"),
    "pipeline_trend": _over(Role.READ, "the rates of a pipeline over the last quarter of an hour"),
    "pause_pipeline": _over(Role.OPERATE, "pause a pipeline"),
    "resume_pipeline": _over(Role.OPERATE, "run"),
    "stop_pipeline": _over(Role.OPERATE, "stop the worker"),
    "restart_pipeline": _over(Role.OPERATE, "restart all or only failed tasks"),
    "clone_pipeline": _over(Role.OPERATE, "create another pipeline from the same declaration"),
    "pipeline_offsets": _over(Role.READ, "the next offset of each task"),
    "change_offsets": _over(Role.OPERATE, "set offsets of a stopped pipeline"),
    "reset_offsets": _over(Role.OPERATE, "reset the offsets of a stopped pipeline"),
    "dry_run": _over(Role.READ, "the result of each step for sample documents"),
    "pipeline_errors": _over(Role.READ, "the content of the error topic"),
    "redrive": _over(Role.OPERATE, "send the error topic through the pipeline again"),
    "redrive_status": _over(Role.READ, "the status of the newest redrive"),
    "cancel_redrive": _over(Role.OPERATE, "cancel a redrive"),
    "pipeline_history": _over(Role.READ, "the history of a pipeline"),
    "pipeline_roles": _over(Role.READ, "the roles on a pipeline"),
    "set_pipeline_role": _over(Role.ADMIN, "give a user a role on a pipeline"),
    "remove_pipeline_role": _over(Role.ADMIN, "remove a user's role on a pipeline"),
}

Id = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="A pipeline's id.")]
FlowName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$", description="A flow's name.")]
Principal = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$", description="Somebody's name.")]
Account = Annotated[str, Path(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9_.@-]{0,254})$", description="An account, or ``*``.")]
Offset = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Query(max_length=100)]
Declaration = Annotated[dict[str, Any], Body(description="A declaration (docs/flows.md, docs/pipelines.md).")]


class PipelineRow(BaseModel):
    """A pipeline in a list."""

    id: str
    name: str
    account: str
    version: int
    phase: Phase
    wanted: str
    created_by: str
    created_at: float
    changed_at: float
    cpus: float
    memory_mib: int


class PipelineView(PipelineRow):
    """A pipeline with its declaration."""

    declaration: dict[str, Any]
    secrets: list[str] = Field(description="the paths of secrets that are set; their values are never shown")


class FlowPage(BaseModel):
    total: int
    flows: list[FlowStatus]


class PipelinePage(BaseModel):
    total: int
    pipelines: list[PipelineRow]


class Changed(BaseModel):
    pipeline: PipelineView
    restarted_for: list[str] = Field(description="fields for which a running worker was restarted")


class Valid(BaseModel):
    declaration: dict[str, Any] = Field(description="with all defaults, without secrets")
    flow: dict[str, Any] = Field(description="the same in the form of flows (docs/flows.md), without defaults")
    guarantee: str = Field(description="the guarantee of its source and sink, and how it is met")


class DryRun(BaseModel):
    model_config = ConfigDict(extra="forbid")

    documents: list[Any] = Field(default_factory=list, max_length=MAX_SAMPLES, description="null is a tombstone")
    keys: list[Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=list,
        max_length=MAX_SAMPLES,
        description="keys of their records, in order; default: sample-0, …",
    )
    newest: int = Field(default=0, ge=0, le=20, description="the number of newest records of its topics that follow")
    declaration: dict[str, Any] | None = Field(
        default=None, description="a declaration to use instead of the pipeline's own"
    )


class Redrive(BaseModel):
    """A selection of the error topic: everything after the last full redrive, or what matches all given conditions."""

    model_config = ConfigDict(extra="forbid")

    step: str = Field(default="", max_length=100, description="the step in which it failed")
    kind: str = Field(default="", max_length=100, description="the kind of the cause")
    reason: str = Field(default="", max_length=200, description="words of the reason")
    first: str = Field(
        default="", max_length=40, description="the first position in the error topic (partition-offset)"
    )
    last: str = Field(default="", max_length=40, description="the last position")
    ids: list[Annotated[str, Field(max_length=40)]] = Field(
        default_factory=list, max_length=MAX_IDS, description="exactly these positions"
    )
    lane: str = Field(default="", max_length=512, description="the lane of the source, such as flights-0")
    low: int | None = Field(default=None, ge=0, le=_MOST, description="the first position in the lane")
    high: int | None = Field(default=None, ge=0, le=_MOST, description="the last position in the lane")
    again: bool = Field(default=False, description="for a full redrive: from the beginning")
    dry_run: bool = Field(default=False, description="count alone")


class RedriveLetters(BaseModel):
    """A selection of a stream's dead letters: all, or those that match all given conditions."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", max_length=200, description="words of the reason")
    lane: str = Field(default="", max_length=512, description="the lane of its source; for rows, stream-NAME")
    low: int | None = Field(default=None, ge=0, le=_MOST, description="the first position in the lane")
    high: int | None = Field(default=None, ge=0, le=_MOST, description="the last position in the lane")
    dry_run: bool = Field(default=False, description="count alone")


class QuotaValues(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pipelines: int = Field(ge=0, le=1_000_000)
    cpus: float = Field(ge=0, le=1e9, description="sum of their resources.cpus", allow_inf_nan=False)
    memory_mib: int = Field(ge=0, le=1 << 40, description="sum of their resources.memory_mib")


class QuotaRow(BaseModel):
    """An account's quota and usage."""

    account: str
    quota: QuotaValues
    used: QuotaValues


class ServiceFacts(BaseModel):
    """The service's name, version, language and architecture."""

    service: str
    version: str
    language: str
    architecture: str


class Health(ServiceFacts):
    dependencies: dict[str, str]


class KindRow(BaseModel):
    """A kind of source or sink."""

    part: str = Field(description="source or sink")
    kind: str = Field(description="its name in a declaration")
    package: str = Field(description="the distribution that it comes from")
    promise: str = Field(description="its guarantee or properties, in words")
    declaration: dict[str, Any] = Field(description="the JSON schema of its declaration")


class ServiceHealth(ServiceFacts):
    ready: bool = Field(description="whether its store responds")


def service_facts() -> dict[str, str]:
    """Return the fields of ServiceFacts."""
    return {
        "service": SERVICE,
        "version": VERSION,
        "language": f"Python {platform.python_version()}",
        "architecture": f"{platform.system()} {platform.machine()}",
    }


def router(management: Management, answers: dict[int | str, dict[str, Any]]) -> APIRouter:
    """Return the routes under /api/v1; `answers` describes the errors."""
    conflict: dict[int | str, dict[str, Any]] = {
        409: {**answers.get(404, {}), "description": "Not in this state, or of another version."}
    }
    only_known = [Depends(_known_parameters)]
    made = APIRouter(prefix="/api/v1", tags=["pipelines"], responses={**answers, **conflict}, dependencies=only_known)

    _look(made, management)
    _service(made, management)
    _declare(made, management)
    _operate(made, management)
    _people(made, management)
    _any_flow(made, management)
    return made


def _known_parameters(request: Request) -> None:
    """Raise InvalidArgument for a parameter that the call does not have, instead of ignoring it."""
    known = {each.alias for each in request.scope["route"].dependant.query_params}
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        takes = f"its parameters are {', '.join(sorted(known))}" if known else "it has none"
        raise InvalidArgument(f"{', '.join(unknown)[:200]} is not a parameter of this call: {takes}")


def _any_flow(made: APIRouter, management: Management) -> None:
    @made.get("/flows")
    def flows(
        request: Request,
        text: Annotated[str, Query(max_length=200, description="in the name")] = "",
        state: FlowState | None = None,
        host: Literal["spark", "range"] | None = None,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> FlowPage:
        """List the flows that the caller may read: declared ones, those that ran here, and those of the service."""
        found = [
            each
            for each in management.flows(_caller(request))
            if text.lower() in each.name.lower() and state in (None, each.state) and host in (None, each.host)
        ]
        return FlowPage(total=len(found), flows=found[offset : offset + limit])

    @made.get("/flows/{pipeline}")
    def flow(request: Request, pipeline: FlowName) -> FlowView:
        """Show one flow: declaration, status, guarantee, lanes with positions and lag, dead letters."""
        return management.show_flow(_caller(request), pipeline)

    @made.put("/flows/{pipeline}/resume")
    def resume_flow(request: Request, pipeline: FlowName) -> FlowView:
        """Run the flow: end its pause, and start it if it does not run."""
        return management.move_flow(_caller(request), pipeline, "resume")

    @made.put("/flows/{pipeline}/pause")
    def pause_flow(request: Request, pipeline: FlowName) -> FlowView:
        """Pause the flow until it is resumed."""
        return management.move_flow(_caller(request), pipeline, "pause")

    @made.put("/flows/{pipeline}/stop")
    def stop_flow(request: Request, pipeline: FlowName) -> FlowView:
        """Stop its processes between two batches. The job of a group of streams stops as a whole."""
        return management.move_flow(_caller(request), pipeline, "stop")

    @made.get("/flows/{pipeline}/errors")
    def flow_errors(
        request: Request,
        pipeline: FlowName,
        reason: Annotated[str, Query(max_length=200, description="words of the reason")] = "",
        lane: Annotated[str, Query(max_length=512, description="of its source; of rows, stream-NAME")] = "",
        low: Annotated[int | None, Query(ge=0, le=_MOST, description="from this position of the lane on")] = None,
        high: Annotated[int | None, Query(ge=0, le=_MOST, description="up to this one")] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> FlowErrors:
        """List dead letters of a flow, newest first, with the reason and the position."""
        chosen = Selection(reason=reason, lane=lane, low=low, high=high)
        return management.flow_errors(_caller(request), pipeline, chosen, limit=limit)

    @made.put("/flows/{pipeline}/redrive")
    def redrive_flow(request: Request, pipeline: FlowName, asked: RedriveLetters) -> FlowRedriven:
        """Send dead letters of a stopped stream again. Idempotent. 409 while it runs."""
        options = asked.model_dump()
        dry_run = options.pop("dry_run")
        return management.redrive_flow(_caller(request), pipeline, Selection(**options), dry_run=dry_run)

    @made.put("/flows/{pipeline}/errors/reset")
    def reset_flow_errors(request: Request, pipeline: FlowName) -> FlowView:
        """Reset its count of failed records (errors.limit). Its dead letters stay."""
        return management.reset_flow_errors(_caller(request), pipeline)


def _view(management: Management, record: Record) -> PipelineView:
    secrets = management.secret_names(record.id)
    return PipelineView(**_row(record), declaration=record.declaration, secrets=secrets)


def _look(made: APIRouter, management: Management) -> None:
    @made.get("/pipelines-health")
    def pipelines_health() -> Health:
        """Show service, version, language, architecture and dependencies."""
        return Health(**service_facts(), dependencies=management.dependencies())

    @made.get("/pipelines-kinds")
    def pipelines_kinds() -> list[KindRow]:
        """List the installed kinds of sources and sinks, each with the JSON schema of its declaration."""
        models = {("source", name): each.model for name, each in source_kinds().items()}
        models |= {("sink", name): each.model for name, each in sink_kinds().items()}
        return [
            KindRow(**row, declaration=models[row["part"], row["kind"]].model_json_schema()) for row in kinds_listed()
        ]

    @made.get("/pipelines")
    def pipelines(
        request: Request,
        text: Annotated[str, Query(max_length=200, description="in id or name")] = "",
        account: Annotated[str | None, Query(max_length=256)] = None,
        phase: Phase | None = None,
        wanted: Literal["RUNNING", "PAUSED", "STOPPED"] | None = None,
        sort: Literal["id", "name", "account", "created_at", "changed_at"] = "id",
        descending: bool = False,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> PipelinePage:
        """List the pipelines that the caller may read, filtered, sorted and paged."""
        found = [
            each
            for each in management.seen_by(_caller(request))
            if (text.lower() in each.id or text.lower() in each.name.lower())
            and account in (None, each.account)
            and phase in (None, each.phase)
            and wanted in (None, each.wanted)
        ]
        found.sort(key=lambda each: (getattr(each, sort), each.id), reverse=descending)
        rows = [PipelineRow(**_row(each)) for each in found[offset : offset + limit]]
        return PipelinePage(total=len(found), pipelines=rows)


def _service(made: APIRouter, management: Management) -> None:
    @made.get("/pipelines-audit")
    def pipelines_audit(
        before: Annotated[int | None, Query(ge=0, le=1 << 62)] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> list[dict[str, Any]]:
        """List the changes of all pipelines, also of deleted ones, and of quotas and keys, newest first."""
        return management.audit(before=before, limit=limit)

    @made.get("/pipelines-quotas")
    def pipelines_quotas() -> list[QuotaRow]:
        """List quota and usage of each account. ``*`` applies to each account without its own quota."""
        return [
            QuotaRow(account=quota.account, quota=_values(quota), used=_values(used))
            for quota, used in management.quotas()
        ]

    @made.put("/pipelines-quotas/{account}", status_code=204)
    def set_quota(request: Request, account: Account, quota: QuotaValues) -> None:
        """Set a quota from now on. Usage beyond it stays. 0 allows nothing."""
        management.set_quota(_caller(request), Quota(account=account, **quota.model_dump()))

    @made.delete("/pipelines-quotas/{account}", status_code=204)
    def drop_quota(request: Request, account: Account) -> None:
        """Remove the account's own quota. The quota of ``*``, or the default, applies again."""
        management.drop_quota(_caller(request), account)


def _values(quota: Quota) -> QuotaValues:
    return QuotaValues(pipelines=quota.pipelines, cpus=quota.cpus, memory_mib=quota.memory_mib)


def _declare(made: APIRouter, management: Management) -> None:
    @made.put("/pipelines/{pipeline}", status_code=201)
    def create_pipeline(request: Request, pipeline: Id, declaration: Declaration) -> PipelineView:
        """Create a pipeline, STOPPED, with its index base, topics, policy and deployment, or nothing at all."""
        return _view(management, management.create(_caller(request), pipeline, declaration))

    @made.put("/pipelines/{pipeline}/validate")
    def validate_pipeline(pipeline: Id, declaration: Declaration) -> Valid:
        """Check a declaration; 422 with a problem for each wrong field. Secrets of an existing one may be omitted."""
        made = management.check(pipeline, declaration)
        return Valid(declaration=as_pipeline(made), flow=made.to_json(), guarantee=made.promise)

    @made.get("/pipelines/{pipeline}")
    def pipeline(pipeline: Id) -> PipelineView:
        """Show one pipeline."""
        return _view(management, management.get(pipeline))

    @made.put("/pipelines/{pipeline}/declaration")
    def update_pipeline(
        request: Request, pipeline: Id, declaration: Declaration, version: Annotated[int, Query(ge=1, le=1 << 62)]
    ) -> Changed:
        """Replace the declaration of `version`; 409 if there is a newer one.

        Name, description, account and labels change while it runs. Any other change restarts its worker between two
        micro-batches. Omitted secrets stay.
        """
        record, restarts = management.update(_caller(request), pipeline, declaration, version=version)
        return Changed(pipeline=_view(management, record), restarted_for=restarts)

    @made.delete("/pipelines/{pipeline}", status_code=204)
    def delete_pipeline(
        request: Request,
        pipeline: Id,
        force: Annotated[bool, Query(description="leave what cannot be removed now")] = False,
    ) -> None:
        """Delete it with the topics and the index that were created for it; older ones stay. 409 unless it is STOPPED.

        With `force`, whatever cannot be removed now stays, too, and the history records it.
        """
        management.delete(_caller(request), pipeline, force=force)


def _operate(made: APIRouter, management: Management) -> None:
    @made.get("/pipelines/{pipeline}/status")
    def pipeline_status(pipeline: Id) -> PipelineStatus:
        """Show state, tasks, lag, counts and causes."""
        return management.status(pipeline)

    @made.get("/pipelines/{pipeline}/trend")
    def pipeline_trend(pipeline: Id) -> Trend:
        """Show rates, lag and latency over the last quarter of an hour."""
        return management.trend(pipeline)

    @made.put("/pipelines/{pipeline}/pause")
    def pause_pipeline(request: Request, pipeline: Id) -> PipelineView:
        """Pause it: its worker runs and reads nothing."""
        return _view(management, management.pause(_caller(request), pipeline))

    @made.put("/pipelines/{pipeline}/resume")
    def resume_pipeline(request: Request, pipeline: Id) -> PipelineView:
        """Run it: start its worker if it does not run."""
        return _view(management, management.resume(_caller(request), pipeline))

    @made.put("/pipelines/{pipeline}/stop")
    def stop_pipeline(request: Request, pipeline: Id) -> PipelineView:
        """Stop its worker, between two micro-batches."""
        return _view(management, management.stop(_caller(request), pipeline))

    @made.put("/pipelines/{pipeline}/restart")
    def restart_pipeline(request: Request, pipeline: Id, only_failed: bool = False) -> PipelineView:
        """Restart its tasks: all, or those that failed."""
        return _view(management, management.restart(_caller(request), pipeline, only_failed=only_failed))

    @made.put("/pipelines/{pipeline}/clone/{to}", status_code=201)
    def clone_pipeline(
        request: Request, pipeline: Id, to: Id, changes: Annotated[dict[str, Any] | None, Body()] = None
    ) -> PipelineView:
        """Create another pipeline from its declaration and `changes`. Secrets must be set again."""
        caller = _caller(request)
        management.admit(CALLS, caller, "create_pipeline", {"pipeline": to})
        return _view(management, management.clone(caller, pipeline, to, changes or {}))

    @made.get("/pipelines/{pipeline}/offsets")
    def pipeline_offsets(pipeline: Id) -> dict[str, int]:
        """List the next offset by task (topic-partition)."""
        return management.offsets(pipeline)

    @made.put("/pipelines/{pipeline}/offsets")
    def change_offsets(
        request: Request, pipeline: Id, offsets: Annotated[dict[str, Offset], Body(max_length=10_000)]
    ) -> dict[str, int]:
        """Set offsets; 409 unless it is STOPPED."""
        return management.change_offsets(_caller(request), pipeline, offsets)

    @made.delete("/pipelines/{pipeline}/offsets")
    def reset_offsets(
        request: Request,
        pipeline: Id,
        to: Annotated[str, Query(max_length=60, description="earliest, latest, or a moment (ISO 8601)")] = "earliest",
    ) -> dict[str, int]:
        """Begin at the earliest retained record, after the latest, or at a moment; 409 unless it is STOPPED."""
        return management.reset_offsets(_caller(request), pipeline, to)

    @made.put("/pipelines/{pipeline}/dry-run")
    def dry_run(request: Request, pipeline: Id, asked: DryRun) -> list[dict[str, Any]]:
        """Show the result of each step for sample documents, without writing anything."""
        return management.dry_run(
            _caller(request), pipeline, asked.documents, asked.declaration, keys=asked.keys, newest=asked.newest
        )

    @made.get("/pipelines/{pipeline}/errors")
    def pipeline_errors(
        pipeline: Id,
        step: Name = "",
        kind: Name = "",
        reason: Annotated[str, Query(max_length=200, description="words of it")] = "",
        first: Annotated[str, Query(max_length=40, description="a place: partition-offset")] = "",
        last: Annotated[str, Query(max_length=40)] = "",
        before: Annotated[str, Query(max_length=20_000, description="`next` of the previous page")] = "",
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> ErrorPage:
        """List failed records, newest first: reason, Kafka Connect's headers, origin, and the record."""
        chosen = Selection(step=step, kind=kind, reason=reason, first=first, last=last)
        return management.errors(pipeline, chosen, before=before, limit=limit)

    @made.put("/pipelines/{pipeline}/redrive", status_code=202)
    def redrive(request: Request, pipeline: Id, asked: Redrive) -> RedriveStatus:
        """Start to send the error topic, or a part of it, through it again. Idempotent. 409 while a redrive runs."""
        options = asked.model_dump()
        again, dry_run = options.pop("again"), options.pop("dry_run")
        return management.redrive(_caller(request), pipeline, Selection(**options), again=again, dry_run=dry_run)

    @made.get("/pipelines/{pipeline}/redrive")
    def redrive_status(pipeline: Id) -> RedriveStatus:
        """Show the progress and the counts of its newest redrive."""
        return management.redrive_status(pipeline)

    @made.delete("/pipelines/{pipeline}/redrive")
    def cancel_redrive(request: Request, pipeline: Id) -> RedriveStatus:
        """Cancel it between two batches. Completed batches remain."""
        return management.cancel_redrive(_caller(request), pipeline)


def _people(made: APIRouter, management: Management) -> None:
    @made.get("/pipelines/{pipeline}/history")
    def pipeline_history(
        pipeline: Id,
        before: Annotated[int | None, Query(ge=0, le=1 << 62)] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> list[dict[str, Any]]:
        """List its history, newest first."""
        return management.history(pipeline, before=before, limit=limit)

    @made.get("/pipelines/{pipeline}/roles")
    def pipeline_roles(pipeline: Id) -> dict[str, PipelineRole]:
        """List the roles on it."""
        return management.roles(pipeline)

    @made.put("/pipelines/{pipeline}/roles/{principal}")
    def set_pipeline_role(
        request: Request, pipeline: Id, principal: Principal, role: PipelineRole
    ) -> dict[str, PipelineRole]:
        """Make a user owner, operator or viewer."""
        return management.set_role(_caller(request), pipeline, principal, role)

    @made.delete("/pipelines/{pipeline}/roles/{principal}")
    def remove_pipeline_role(request: Request, pipeline: Id, principal: Principal) -> dict[str, PipelineRole]:
        """Remove a user's role. The last owner stays."""
        return management.set_role(_caller(request), pipeline, principal, None)


def _caller(request: Request) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def _row(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in PipelineRow.model_fields}
