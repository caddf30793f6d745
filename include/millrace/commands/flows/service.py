"""``millrace flows service``: the pipeline service, and a client of one that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.base.errors import InvalidArgument, PipelineNotFound
from millrace.base.extras import require_extras
from millrace.commands.flows.group import Config
from millrace.commands.flows.group import app as flows
from millrace.commands.parts.command_line import (
    CommandContext,
    CommandGroup,
    JsonServiceContext,
    ReportingGroup,
    ServiceContext,
    exec_python,
    print_facts,
    print_json,
    print_rows,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.commands.parts.pipeline_client import PipelineClient

app = CommandGroup(
    help="Pipelines of a running pipeline service, and the service itself.", cls=ReportingGroup, no_args_is_help=True
)
flows.add_typer(app, name="service")

Name = Annotated[str, typer.Argument(metavar="PIPELINE", help="Its id.", show_default=False)]
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The declaration, YAML or JSON; ${env:NAME} for secrets.", show_default=False),
]
_COLUMNS: Final = ("id", "name", "account", "phase", "wanted", "version", "cpus", "memory_mib")
_STATUS: Final = ("pipeline", "state", "cause", "pid", "cpu_percent", "memory_bytes")
_TASK: Final = (
    "task", "state", "position", "lag", "records_in", "records_out", "records_error", "records_filtered",
    "records_stale", "retries", "failures", "cause",
)  # fmt: skip


def _service(context: ServiceContext) -> PipelineClient:
    from millrace.commands.parts.pipeline_client import PipelineClient

    return PipelineClient(context.settings, context.server, roots=context.roots)


def _ask(context: ServiceContext, method: str, path: str, body: Any = None, **query: Any) -> Any:
    with _service(context) as service:
        return service.request(method, path, body, **query)


def _named(file: Path, given: str) -> tuple[str, dict[str, Any]]:
    """Return the name of what `file` declares, or `given`, and the declaration with it."""
    from millrace.flows.declare.file import read_declaration
    from millrace.flows.declare.spellings import NAME, spelling_of

    declared = read_declaration(file)
    field = NAME[spelling_of(declared)]
    found = given or declared.get(field)
    if not isinstance(found, str) or not found:
        raise InvalidArgument(f"the declaration has no {field}: write `{field}: NAME` into it, or say --id NAME")
    return found, {**declared, field: found}


def _tell(view: dict[str, Any], *, as_json: bool) -> None:
    shown = {name: view[name] for name in _COLUMNS} if not as_json else view
    print_facts(shown, as_json=as_json)


@app.callback()
def _all() -> None:
    require_extras("pipelines")


@app.command()
def serve(context: CommandContext, config: Config = None) -> None:
    """Serve the management API of pipelines (port 13012) and supervise their workers, until Ctrl-C or SIGTERM.

    Example: `millrace flows service serve --config pipeline-config.yaml`
    """
    more = [] if config is None else ["--config", str(config.absolute())]
    exec_python(["-m", "millrace.service.pipelines", *more], context.settings)


@app.command()
def new_key() -> None:
    """Generate an encryption key for the secrets of pipelines, for MILLRACE_PIPELINE_KEYS.

    Example: `millrace flows service new-key`
    """
    from millrace.flows.declare.keys import new_key as made

    typer.echo(made())


@app.command()
def rotate_keys(context: CommandContext) -> None:
    """Re-encrypt the secrets of all pipelines with the first key of MILLRACE_PIPELINE_KEYS.

    Example: `millrace flows service rotate-keys`
    """
    from getpass import getuser

    from millrace.pipelines.deploy.deployment import Deployment
    from millrace.pipelines.store.store import open_pipelines

    settings = context.settings
    with open_pipelines(settings) as store:
        rotated = store.rotate_keys(who=getuser())
        Deployment(settings).seal_anew(store)
    typer.echo(f"{rotated} secrets are encrypted by the first key")


@app.command()
def create(
    context: JsonServiceContext,
    file: File,
    name: Annotated[str, typer.Option("--id", metavar="NAME", help="In place of the declaration's own.")] = "",
    run: Annotated[bool, typer.Option("--run", help="Start it at once. Without it the pipeline is STOPPED.")] = False,
) -> None:
    """Create a pipeline on the service: index, topics and deployment. A failed create leaves nothing behind.

    Example: `millrace flows service create flights.yaml --run`
    """
    found, declared = _named(file, name)
    view = _ask(context, "PUT", f"pipelines/{found}", declared)
    if run:
        view = _ask(context, "PUT", f"pipelines/{found}/resume")
    _tell(view, as_json=context.as_json)


@app.command()
def validate(
    context: ServiceContext,
    file: File,
    name: Annotated[str, typer.Option("--id", metavar="NAME", help="In place of the declaration's own.")] = "",
) -> None:
    """Check a declaration on the service, with its defaults, without creating anything. `check` needs no service.

    Example: `millrace flows service validate flights.yaml`
    """
    found, declared = _named(file, name)
    _ask(context, "PUT", f"pipelines/{found}/validate", declared)
    typer.echo("The declaration is valid.")


@app.command("list")
def list_pipelines(
    context: JsonServiceContext,
    text: Annotated[str, typer.Option("--text", metavar="TEXT", help="In id or name.")] = "",
    account: Annotated[str, typer.Option("--account", metavar="NAME", help="Of this account.")] = "",
) -> None:
    """List the pipelines that you may read.

    Example: `millrace flows service list`
    """
    rows: list[dict[str, Any]] = []
    with _service(context) as service:
        while True:
            page = service.request("GET", "pipelines", text=text, account=account, offset=len(rows), limit=200)
            rows += page["pipelines"]
            if not page["pipelines"] or len(rows) >= page["total"]:
                break
    empty = "There are no pipelines: `millrace flows service create FILE` makes one."
    print_rows(rows, columns=_COLUMNS, as_json=context.as_json, empty=empty)


@app.command()
def get(context: ServiceContext, name: Name) -> None:
    """Show a pipeline as JSON: its declaration without secrets, and the version that an update names.

    Example: `millrace flows service get flights`
    """
    print_json(_ask(context, "GET", f"pipelines/{name}"))


@app.command()
def status(context: JsonServiceContext, name: Name) -> None:
    """Show the state of a pipeline's worker, and of each task the position, lag, counts and last failure.

    A pipeline that runs on this host needs no service.

    Example: `millrace flows service status flights`
    """
    said = _ask(context, "GET", f"pipelines/{name}/status") if context.server else _local_status(context.settings, name)
    if context.as_json:
        print_json(said)
        return
    print_facts({name: said[name] for name in _STATUS}, as_json=False)
    print_rows(said["tasks"], columns=_TASK, as_json=False, empty="It has no tasks yet.")


def _local_status(settings: Settings, name: str) -> dict[str, Any]:
    from millrace.flows.range_host.observed import observed, pipelines_here

    if name not in pipelines_here(settings):
        raise PipelineNotFound(f"no pipeline {name!r} has run on this host with the data folder {settings.data_dir}")
    return observed(settings, name).model_dump(mode="json")


@app.command()
def update(
    context: JsonServiceContext,
    name: Name,
    file: File,
    version: Annotated[
        int, typer.Option("--version", metavar="N", help="The one that the change was made from (`get` shows it).")
    ],
) -> None:
    """Replace the declaration, unless it changed since that version. Omitted secrets stay.

    Example: `millrace flows service update flights flights.yaml --version 1`
    """
    path = f"pipelines/{name}/declaration"
    found = _ask(context, "PUT", path, _named(file, name)[1], version=version)
    _tell(found["pipeline"], as_json=context.as_json)
    if found["restarted_for"] and not context.as_json:
        typer.echo(f"A worker that runs starts again, for {', '.join(found['restarted_for'])}.")


def _lifecycle(call: str, words: str) -> Callable[..., None]:
    def command(context: JsonServiceContext, name: Name) -> None:
        _tell(_ask(context, "PUT", f"pipelines/{name}/{call}"), as_json=context.as_json)

    command.__doc__ = f"{words}\n\n    Example: `millrace flows service {call} flights`\n    "
    return command


app.command("resume")(_lifecycle("resume", "Run a pipeline; start its worker if necessary."))
app.command("pause")(_lifecycle("pause", "Pause a pipeline; its worker stays."))
app.command("stop")(_lifecycle("stop", "Stop a pipeline's worker between two micro-batches."))


@app.command()
def restart(
    context: JsonServiceContext,
    name: Name,
    only_failed: Annotated[bool, typer.Option("--only-failed", help="Only failed tasks.")] = False,
) -> None:
    """Start the tasks of a pipeline again.

    Example: `millrace flows service restart flights --only-failed`
    """
    path = f"pipelines/{name}/restart"
    _tell(_ask(context, "PUT", path, only_failed=str(only_failed).lower()), as_json=context.as_json)


@app.command()
def clone(
    context: JsonServiceContext,
    name: Name,
    to: Annotated[str, typer.Argument(metavar="NEW", help="The id of the new one.", show_default=False)],
    changes: Annotated[
        Path | None,
        typer.Option(
            "--changes", metavar="FILE", help="YAML or JSON over its declaration; secrets are to be given anew."
        ),
    ] = None,
) -> None:
    """Clone a pipeline.

    Example: `millrace flows service clone flights flights-2`
    """
    from millrace.flows.declare.file import read_declaration

    body = {} if changes is None else read_declaration(changes)
    _tell(_ask(context, "PUT", f"pipelines/{name}/clone/{to}", body), as_json=context.as_json)


@app.command()
def offsets(
    context: JsonServiceContext,
    name: Name,
    put: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TASK=OFFSET", help="Such as flights-0=17. Repeat it.", show_default=False),
    ] = None,
    reset: Annotated[
        str, typer.Option("--reset", metavar="TO", help="earliest, latest, or a moment such as 2026-11-21T13:00.")
    ] = "",
) -> None:
    """Show the next offset of each task; set some or reset all while the pipeline is STOPPED.

    Example: `millrace flows service offsets flights --reset earliest`
    """
    if put and reset:
        raise InvalidArgument("--set and --reset cannot be combined: use one of them")
    path = f"pipelines/{name}/offsets"
    if put:
        found = _ask(context, "PUT", path, dict(map(_offset, put)))
    elif reset:
        found = _ask(context, "DELETE", path, to=reset)
    else:
        found = _ask(context, "GET", path)
    rows = [{"task": task, "offset": offset} for task, offset in sorted(found.items())]
    print_rows(rows, columns=("task", "offset"), as_json=context.as_json, empty="It has read nothing yet.")


def _offset(text: str) -> tuple[str, int]:
    task, _, offset = text.rpartition("=")
    if not task or not (offset.isascii() and offset.isdigit()):
        raise InvalidArgument(f"--set takes a task and its next offset, such as flights-0=17, not {text[:100]!r}")
    return task, int(offset)


@app.command()
def dry_run(
    context: ServiceContext,
    name: Name,
    samples: Annotated[
        Path | None, typer.Argument(metavar="SAMPLES", help="Documents, JSON, one a line.", show_default=False)
    ] = None,
    newest: Annotated[
        int,
        typer.Option("--newest", metavar="N", help="So many of the newest records of its topics, too.", min=0, max=20),
    ] = 0,
    declaration: Annotated[
        Path | None, typer.Option("--declaration", metavar="FILE", help="By this one in place of its own.")
    ] = None,
) -> None:
    """Show the result of each step for sample documents, as JSON. Writes nothing.

    Example: `millrace flows service dry-run flights samples.jsonl`
    """
    if samples is None and not newest:
        raise InvalidArgument("name a file of documents, or say --newest N")
    documents = []
    for number, line in enumerate("" if samples is None else samples.read_text(encoding="utf-8").splitlines(), 1):
        try:
            documents += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise InvalidArgument(f"{samples}, line {number}, is not JSON: {error}") from None
    body: dict[str, Any] = {"documents": documents, "newest": newest}
    if declaration is not None:
        body["declaration"] = _named(declaration, name)[1]
    print_json(_ask(context, "PUT", f"pipelines/{name}/dry-run", body))


@app.command()
def errors(
    context: JsonServiceContext,
    name: Name,
    step: Annotated[str, typer.Option(metavar="NAME", help="What failed in this step.")] = "",
    kind: Annotated[str, typer.Option(metavar="KIND", help="Of this kind, such as CAST.")] = "",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="With these words in its reason.")] = "",
    before: Annotated[str, typer.Option(metavar="CURSOR", help="The `next` of an earlier page.")] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=200, help="So many at most.")] = 50,
) -> None:
    """List the records of a pipeline's error topic with reason and origin, newest first; --json shows all fields.

    Example: `millrace flows service errors flights --kind CAST`
    """
    path = f"pipelines/{name}/errors"
    page = _ask(context, "GET", path, step=step, kind=kind, reason=reason, before=before, limit=limit)
    if context.as_json:
        print_json(page)
        return
    rows = [{**each, "from": f"{each['topic']}-{each['partition']} @ {each['offset']}"} for each in page["errors"]]
    print_rows(rows, columns=("id", "kind", "step", "reason", "from", "value"), as_json=False, empty="No record fits.")
    if page["next"]:
        typer.echo(f"More: --before {page['next']}")


@app.command()
def redrive_errors(
    context: JsonServiceContext,
    name: Name,
    step: Annotated[str, typer.Option(metavar="NAME", help="What failed in this step.")] = "",
    kind: Annotated[str, typer.Option(metavar="KIND", help="Of this kind, such as CAST.")] = "",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="With these words in its reason.")] = "",
    first: Annotated[
        str, typer.Option(metavar="PLACE", help="From this place of the error topic on, such as 0-17.")
    ] = "",
    last: Annotated[str, typer.Option(metavar="PLACE", help="Up to this one.")] = "",
    ids: Annotated[
        list[str] | None, typer.Option("--place", metavar="PLACE", help="Just this one. Repeat it.", show_default=False)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="From the beginning: what was redriven before, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show how the newest one is; begin none.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="End the one that runs.")] = False,
) -> None:
    """Redrive a pipeline's error topic, or a selection of it, on the service. Repeating it is idempotent.

    Example: `millrace flows service redrive-errors flights --kind CAST`

    Example: `millrace flows service redrive-errors flights --show`
    """
    path = f"pipelines/{name}/redrive"
    if show or cancel:
        found = _ask(context, "DELETE" if cancel else "GET", path)
    else:
        chosen = {"step": step, "kind": kind, "reason": reason, "first": first, "last": last, "ids": ids or []}
        found = _ask(context, "PUT", path, {**chosen, "again": again, "dry_run": dry_run})
    if context.as_json:
        print_json(found)
        return
    facts = {
        key: found[key] for key in ("pipeline", "state", "id", "asked_by", "done", "of", "cause") if found[key] != ""
    }
    print_facts({**facts, **found["counts"]}, as_json=False)


@app.command()
def delete(
    context: ServiceContext,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Leave what cannot be taken away now; the history names it.")
    ] = False,
) -> None:
    """Delete a STOPPED pipeline with the topics and the index that were created for it, and their documents.

    Example: `millrace flows service delete flights --yes`
    """
    if not yes:
        typer.confirm(f"Delete {name}, with the topics and the index that were made for it?", abort=True)
    _ask(context, "DELETE", f"pipelines/{name}{'?force=true' if force else ''}")
    typer.echo(f"{name} is deleted.")
