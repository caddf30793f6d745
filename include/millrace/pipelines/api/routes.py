"""The calls as routes, in Kafka Connect's vocabulary, and the permission that each needs.

Calls that change something are PUT or DELETE, since a browser sends neither on behalf of a page from another site.
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
        (Role.READ,), Scope.EVERYTHING, description="who did what to any pipeline, quota or key"
    ),
    "pipelines_quotas": Requirement(
        (Role.READ,), Scope.EVERYTHING, description="what the pipelines of each account may take, and do"
    ),
    "set_quota": Requirement(
        (Role.ADMIN,), Scope.EVERYTHING, description="say what the pipelines of an account may take together"
    ),
    "drop_quota": Requirement((Role.ADMIN,), Scope.EVERYTHING, description="take an account's own quota away"),
    "pipelines_kinds": Requirement(
        (Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the kinds of sources and sinks that are installed"
    ),
    "pipelines": Requirement((Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the pipelines that one may read"),
    "create_pipeline": _over(Role.OPERATE, "make a pipeline, and become its owner"),
    "validate_pipeline": _over(Role.OPERATE, "check a declaration; nothing is made"),
    "pipeline": _over(Role.READ, "one pipeline, without its secrets"),
    "flows": Requirement(
        (Role.READ, Role.PRODUCE), Scope.ANYTHING, description="the flows that one may read, whichever host runs them"
    ),
    "flow": _over(Role.READ, "one flow: its declaration without secrets, status, promise, lanes and positions"),
    "resume_flow": _over(Role.OPERATE, "run a flow; a stream needs operate on everything"),
    "pause_flow": _over(Role.OPERATE, "have a flow take nothing; a stream needs operate on everything"),
    "stop_flow": _over(Role.OPERATE, "end a flow's processes; a stream needs operate on everything"),
    "flow_errors": _over(Role.READ, "a flow's dead letters; those of a stream need read on everything"),
    "redrive_flow": _over(Role.OPERATE, "send a stream's dead letters again, which needs operate on everything"),
    "reset_flow_errors": _over(Role.OPERATE, "begin a flow's count of failed records anew; a stream: on everything"),
    "update_pipeline": _over(Role.OPERATE, "change a pipeline's declaration"),
    "delete_pipeline": _over(Role.ADMIN, "delete a pipeline, and what was made for it"),
    "pipeline_status": _over(Role.READ, "how a pipeline and its tasks are"),
    "pipeline_trend": _over(Role.READ, "how a pipeline did over the last quarter of an hour"),
    "pause_pipeline": _over(Role.OPERATE, "take nothing for a while"),
    "resume_pipeline": _over(Role.OPERATE, "run"),
    "stop_pipeline": _over(Role.OPERATE, "end the worker"),
    "restart_pipeline": _over(Role.OPERATE, "start all or only failed tasks again"),
    "clone_pipeline": _over(Role.OPERATE, "make another pipeline of the same declaration"),
    "pipeline_offsets": _over(Role.READ, "the next offset of each task"),
    "change_offsets": _over(Role.OPERATE, "set offsets of a stopped pipeline"),
    "reset_offsets": _over(Role.OPERATE, "begin a stopped pipeline anew"),
    "dry_run": _over(Role.READ, "what each step makes of sample documents"),
    "pipeline_errors": _over(Role.READ, "what lies in the error topic"),
    "redrive": _over(Role.OPERATE, "send the error topic through the pipeline again"),
    "redrive_status": _over(Role.READ, "how the newest redrive is"),
    "cancel_redrive": _over(Role.OPERATE, "end a redrive"),
    "pipeline_history": _over(Role.READ, "who did what to a pipeline"),
    "pipeline_roles": _over(Role.READ, "who is what to a pipeline"),
    "set_pipeline_role": _over(Role.ADMIN, "give somebody a role on a pipeline"),
    "remove_pipeline_role": _over(Role.ADMIN, "take somebody's role on a pipeline away"),
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
    """A pipeline, whole."""

    declaration: dict[str, Any]
    secrets: list[str] = Field(description="where secrets are set; what they are is never shown")


class FlowPage(BaseModel):
    total: int
    flows: list[FlowStatus]


class PipelinePage(BaseModel):
    total: int
    pipelines: list[PipelineRow]


class Changed(BaseModel):
    pipeline: PipelineView
    restarted_for: list[str] = Field(description="fields that a running worker started again for")


class Valid(BaseModel):
    declaration: dict[str, Any] = Field(description="with all defaults, without secrets")
    flow: dict[str, Any] = Field(description="the same in the form of flows (docs/flows.md), without defaults")
    guarantee: str = Field(description="what its pair of source and sink promises, and how")


class DryRun(BaseModel):
    model_config = ConfigDict(extra="forbid")

    documents: list[Any] = Field(default_factory=list, max_length=MAX_SAMPLES, description="null is a tombstone")
    keys: list[Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=list, max_length=MAX_SAMPLES, description="of their records, in turn; without: sample-0, …"
    )
    newest: int = Field(default=0, ge=0, le=20, description="behind them so many of the newest records of its topics")
    declaration: dict[str, Any] | None = Field(default=None, description="another than the pipeline's own")


class Redrive(BaseModel):
    """All that lies in the error topic behind the last redrive of all of it, or what everything given here fits."""

    model_config = ConfigDict(extra="forbid")

    step: str = Field(default="", max_length=100, description="it failed in this step")
    kind: str = Field(default="", max_length=100, description="of this kind of fault")
    reason: str = Field(default="", max_length=200, description="words of the reason")
    first: str = Field(
        default="", max_length=40, description="from this place of the error topic on (partition-offset)"
    )
    last: str = Field(default="", max_length=40, description="up to this one")
    ids: list[Annotated[str, Field(max_length=40)]] = Field(
        default_factory=list, max_length=MAX_IDS, description="just these places"
    )
    lane: str = Field(default="", max_length=512, description="of this lane of the source, such as flights-0")
    low: int | None = Field(default=None, ge=0, le=_MOST, description="from this position of the lane on")
    high: int | None = Field(default=None, ge=0, le=_MOST, description="up to this one")
    again: bool = Field(default=False, description="of all of it: from the beginning")
    dry_run: bool = Field(default=False, description="count alone")


class RedriveLetters(BaseModel):
    """All dead letters of a stream, or those that everything given here fits."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", max_length=200, description="words of the reason")
    lane: str = Field(default="", max_length=512, description="of its source; of rows, stream-NAME")
    low: int | None = Field(default=None, ge=0, le=_MOST, description="from this position of the lane on")
    high: int | None = Field(default=None, ge=0, le=_MOST, description="up to this one")
    dry_run: bool = Field(default=False, description="count alone")


class QuotaValues(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pipelines: int = Field(ge=0, le=1_000_000)
    cpus: float = Field(ge=0, le=1e9, description="sum of their resources.cpus", allow_inf_nan=False)
    memory_mib: int = Field(ge=0, le=1 << 40, description="sum of their resources.memory_mib")


class QuotaRow(BaseModel):
    """An account's quota, and what it takes of it."""

    account: str
    quota: QuotaValues
    used: QuotaValues


class ServiceFacts(BaseModel):
    """What the service is."""

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
    promise: str = Field(description="what it promises, in words")
    declaration: dict[str, Any] = Field(description="the JSON schema of its declaration")


class ServiceHealth(ServiceFacts):
    ready: bool = Field(description="its store answers")


def service_facts() -> dict[str, str]:
    """The fields of ServiceFacts."""
    return {
        "service": SERVICE,
        "version": VERSION,
        "language": f"Python {platform.python_version()}",
        "architecture": f"{platform.system()} {platform.machine()}",
    }


def router(management: Management, answers: dict[int | str, dict[str, Any]]) -> APIRouter:
    """Routes under /api/v1; `answers` describes what is not a success."""
    told: dict[int | str, dict[str, Any]] = {
        409: {**answers.get(404, {}), "description": "Not in this state, or of another version."}
    }
    only_known = [Depends(_known_parameters)]
    made = APIRouter(prefix="/api/v1", tags=["pipelines"], responses={**answers, **told}, dependencies=only_known)

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
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise InvalidArgument(f"{', '.join(unknown)[:200]} is no parameter of this call: {takes}")


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
        """The flows that one may read: declared ones, those that have run here, and those that the service manages."""
        found = [
            each
            for each in management.flows(_caller(request))
            if text.lower() in each.name.lower() and state in (None, each.state) and host in (None, each.host)
        ]
        return FlowPage(total=len(found), flows=found[offset : offset + limit])

    @made.get("/flows/{pipeline}")
    def flow(request: Request, pipeline: FlowName) -> FlowView:
        """One flow: declaration, status, guarantee, lanes with positions and lag, dead letters."""
        return management.show_flow(_caller(request), pipeline)

    @made.put("/flows/{pipeline}/resume")
    def resume_flow(request: Request, pipeline: FlowName) -> FlowView:
        """Have it run: it is no longer paused, and is started where it does not run."""
        return management.move_flow(_caller(request), pipeline, "resume")

    @made.put("/flows/{pipeline}/pause")
    def pause_flow(request: Request, pipeline: FlowName) -> FlowView:
        """Have it take nothing until it is resumed."""
        return management.move_flow(_caller(request), pipeline, "pause")

    @made.put("/flows/{pipeline}/stop")
    def stop_flow(request: Request, pipeline: FlowName) -> FlowView:
        """End its processes between two batches. The job of a group of streams ends as a whole."""
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
        """Dead letters of a flow, the newest first: what it could not process, with the reason and the place."""
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
        """Begin its count of failed records anew (errors.limit). Its dead letters stay."""
        return management.reset_flow_errors(_caller(request), pipeline)


def _view(management: Management, record: Record) -> PipelineView:
    secrets = management.secret_names(record.id)
    return PipelineView(**_row(record), declaration=record.declaration, secrets=secrets)


def _look(made: APIRouter, management: Management) -> None:
    @made.get("/pipelines-health")
    def pipelines_health() -> Health:
        """Service, version, language, architecture, dependencies."""
        return Health(**service_facts(), dependencies=management.dependencies())

    @made.get("/pipelines-kinds")
    def pipelines_kinds() -> list[KindRow]:
        """The kinds of sources and sinks that are installed, each with the JSON schema of its declaration."""
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
        """The pipelines that one may read, filtered, sorted, a page of them."""
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
        """Who did what to which pipeline, newest first; of those that are gone, too, and of quotas and keys."""
        return management.audit(before=before, limit=limit)

    @made.get("/pipelines-quotas")
    def pipelines_quotas() -> list[QuotaRow]:
        """Quota and usage of each account; ``*`` is for each account without a quota of its own."""
        return [
            QuotaRow(account=quota.account, quota=_values(quota), used=_values(used))
            for quota, used in management.quotas()
        ]

    @made.put("/pipelines-quotas/{account}", status_code=204)
    def set_quota(request: Request, account: Account, quota: QuotaValues) -> None:
        """From now on; what an account has beyond it stays. 0 is nothing at all."""
        management.set_quota(_caller(request), Quota(account=account, **quota.model_dump()))

    @made.delete("/pipelines-quotas/{account}", status_code=204)
    def drop_quota(request: Request, account: Account) -> None:
        """It has the quota of ``*`` again, or the default."""
        management.drop_quota(_caller(request), account)


def _values(quota: Quota) -> QuotaValues:
    return QuotaValues(pipelines=quota.pipelines, cpus=quota.cpus, memory_mib=quota.memory_mib)


def _declare(made: APIRouter, management: Management) -> None:
    @made.put("/pipelines/{pipeline}", status_code=201)
    def create_pipeline(request: Request, pipeline: Id, declaration: Declaration) -> PipelineView:
        """Create it with its index base, topics, policy and deployment; STOPPED. All of it is created, or nothing."""
        return _view(management, management.create(_caller(request), pipeline, declaration))

    @made.put("/pipelines/{pipeline}/validate")
    def validate_pipeline(pipeline: Id, declaration: Declaration) -> Valid:
        """Check a declaration; 422 with a problem for each wrong field. Secrets of an existing one may be omitted."""
        made = management.check(pipeline, declaration)
        return Valid(declaration=as_pipeline(made), flow=made.to_json(), guarantee=made.promise)

    @made.get("/pipelines/{pipeline}")
    def pipeline(pipeline: Id) -> PipelineView:
        """One pipeline."""
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
        force: Annotated[bool, Query(description="leave what cannot be taken away now")] = False,
    ) -> None:
        """Delete it with the topics and the index that were created for it; older ones stay. 409 unless it is STOPPED.

        With `force`, whatever cannot be reached stays, too, and the history records it.
        """
        management.delete(_caller(request), pipeline, force=force)


def _operate(made: APIRouter, management: Management) -> None:
    @made.get("/pipelines/{pipeline}/status")
    def pipeline_status(pipeline: Id) -> PipelineStatus:
        """State, tasks, lag, counts, causes."""
        return management.status(pipeline)

    @made.get("/pipelines/{pipeline}/trend")
    def pipeline_trend(pipeline: Id) -> Trend:
        """Rates, lag and latency over the last quarter of an hour."""
        return management.trend(pipeline)

    @made.put("/pipelines/{pipeline}/pause")
    def pause_pipeline(request: Request, pipeline: Id) -> PipelineView:
        """Its worker stays and takes nothing."""
        return _view(management, management.pause(_caller(request), pipeline))

    @made.put("/pipelines/{pipeline}/resume")
    def resume_pipeline(request: Request, pipeline: Id) -> PipelineView:
        """Run it; its worker is started where there is none."""
        return _view(management, management.resume(_caller(request), pipeline))

    @made.put("/pipelines/{pipeline}/stop")
    def stop_pipeline(request: Request, pipeline: Id) -> PipelineView:
        """End its worker, between two micro-batches."""
        return _view(management, management.stop(_caller(request), pipeline))

    @made.put("/pipelines/{pipeline}/restart")
    def restart_pipeline(request: Request, pipeline: Id, only_failed: bool = False) -> PipelineView:
        """Start its tasks again: all, or those that failed."""
        return _view(management, management.restart(_caller(request), pipeline, only_failed=only_failed))

    @made.put("/pipelines/{pipeline}/clone/{to}", status_code=201)
    def clone_pipeline(
        request: Request, pipeline: Id, to: Id, changes: Annotated[dict[str, Any] | None, Body()] = None
    ) -> PipelineView:
        """Another one like it, with `changes` over its declaration; secrets are to be given anew."""
        caller = _caller(request)
        management.admit(CALLS, caller, "create_pipeline", {"pipeline": to})
        return _view(management, management.clone(caller, pipeline, to, changes or {}))

    @made.get("/pipelines/{pipeline}/offsets")
    def pipeline_offsets(pipeline: Id) -> dict[str, int]:
        """The next offset by task (topic-partition)."""
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
        """Begin at the earliest record that is kept, behind the latest, or at a moment; 409 unless it is STOPPED."""
        return management.reset_offsets(_caller(request), pipeline, to)

    @made.put("/pipelines/{pipeline}/dry-run")
    def dry_run(request: Request, pipeline: Id, asked: DryRun) -> list[dict[str, Any]]:
        """What each step makes of sample documents; nothing is written."""
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
        before: Annotated[str, Query(max_length=20_000, description="`next` of the page before")] = "",
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> ErrorPage:
        """What failed, newest first: reason, headers as Kafka Connect names them, where it came from, the record."""
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
        """How far its newest redrive is, and what became of what it looked at."""
        return management.redrive_status(pipeline)

    @made.delete("/pipelines/{pipeline}/redrive")
    def cancel_redrive(request: Request, pipeline: Id) -> RedriveStatus:
        """End it between two batches; completed batches remain."""
        return management.cancel_redrive(_caller(request), pipeline)


def _people(made: APIRouter, management: Management) -> None:
    @made.get("/pipelines/{pipeline}/history")
    def pipeline_history(
        pipeline: Id,
        before: Annotated[int | None, Query(ge=0, le=1 << 62)] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> list[dict[str, Any]]:
        """Who did what, newest first."""
        return management.history(pipeline, before=before, limit=limit)

    @made.get("/pipelines/{pipeline}/roles")
    def pipeline_roles(pipeline: Id) -> dict[str, PipelineRole]:
        """Who is what to it."""
        return management.roles(pipeline)

    @made.put("/pipelines/{pipeline}/roles/{principal}")
    def set_pipeline_role(
        request: Request, pipeline: Id, principal: Principal, role: PipelineRole
    ) -> dict[str, PipelineRole]:
        """Make somebody owner, operator or viewer."""
        return management.set_role(_caller(request), pipeline, principal, role)

    @made.delete("/pipelines/{pipeline}/roles/{principal}")
    def remove_pipeline_role(request: Request, pipeline: Id, principal: Principal) -> dict[str, PipelineRole]:
        """Take somebody's role away; the last owner stays."""
        return management.set_role(_caller(request), pipeline, principal, None)


def _caller(request: Request) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def _row(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in PipelineRow.model_fields}
