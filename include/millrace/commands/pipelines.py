"""``millrace pipelines``: run, check, show and redrive a pipeline from its declaration."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.errors import MillraceError
from millrace.base.extras import require_extras
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    exec_python,
    print_facts,
    print_json,
    print_rows,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.flows.declare.pipeline import Pipeline

app = command_group("pipelines", OPERATE_PANEL, "Pipelines: topics in, transformed documents out.")

Declaration = Annotated[
    Path, typer.Argument(metavar="FILE", help="The declaration, YAML or JSON; ${env:NAME} for secrets.")
]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A pipeline-config.yaml with the defaults.")
]


@app.callback()
def _all() -> None:
    require_extras("pipelines")


@app.command()
def run(
    context: CommandContext,
    file: Declaration,
    config: Config = None,
    until_end: Annotated[bool, typer.Option("--until-end", help="Process the available records, then end.")] = False,
) -> None:
    """Run a pipeline in the foreground until Ctrl-C or SIGTERM. A worker that dies restarts with a back-off.

    Example: `millrace pipelines run flights.yaml`
    """
    from millrace.flows.range_host.supervisor import supervise

    settings = context.settings
    pipeline = _pipeline(file, config)  # errors of the declaration end the command, not a worker that restarts
    _report_missing_source(settings, pipeline)
    raise typer.Exit(supervise(settings, file, config=config, until_end=until_end))


def _report_missing_source(settings: Settings, pipeline: Pipeline) -> None:
    """Print why the source cannot be read yet. The worker tries again until it can, and writes to its own log only."""
    from millrace.flows.range_host.definition import places_of

    with closing(places_of(settings, pipeline)) as places:
        try:
            places.ends()
        except MillraceError as error:
            typer.echo(f"{error.code}: {error}. The worker tries again.", err=True)


@app.command()
def serve(context: CommandContext, config: Config = None) -> None:
    """Serve the management API of pipelines (port 13012) and supervise their workers, until Ctrl-C or SIGTERM.

    Example: `millrace pipelines serve --config pipeline-config.yaml`
    """
    more = [] if config is None else ["--config", str(config.absolute())]
    exec_python(["-m", "millrace.service.pipelines", *more], context.settings)


@app.command()
def new_key() -> None:
    """Generate an encryption key for the secrets of pipelines, for MILLRACE_PIPELINE_KEYS.

    Example: `millrace pipelines new-key`
    """
    from millrace.flows.declare.keys import new_key as made

    typer.echo(made())


@app.command()
def rotate_keys(context: CommandContext) -> None:
    """Re-encrypt the secrets of all pipelines with the first key of MILLRACE_PIPELINE_KEYS.

    Example: `millrace pipelines rotate-keys`
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
def check(context: JsonContext, file: Declaration, config: Config = None) -> None:
    """Check a declaration without creating or contacting anything.

    Example: `millrace pipelines check flights.yaml`
    """
    from millrace.flows.declare.part import invalid
    from millrace.flows.registry import sink_kinds

    pipeline = _pipeline(file, config)
    if (problem := pipeline.unordered()) is not None:
        raise invalid([problem])
    print_facts(
        {
            "pipeline": pipeline.id,
            "topics": ", ".join(pipeline.topics()["input"]) or getattr(pipeline.source, "topics_regex", ""),
            "source": pipeline.source.kind,
            "steps": len(pipeline.steps),
            "sink": pipeline.sink.kind,
            "guarantee": sink_kinds()[pipeline.sink.kind].guarantee,
            "error topic": pipeline.errors_topic,
        },
        as_json=context.as_json,
    )


@app.command()
def kinds(context: JsonContext) -> None:
    """List the kinds of sources and sinks: those of this package and of packages that are installed beside it.

    Example: `millrace pipelines kinds`
    """
    from millrace.flows.registry import kinds_listed

    rows = kinds_listed()
    print_rows(rows, columns=("part", "kind", "package", "promise"), as_json=context.as_json, empty="no kinds")


@app.command()
def show(
    file: Declaration,
    samples: Annotated[Path, typer.Argument(metavar="SAMPLES", help="Documents, JSON, one a line.")],
    config: Config = None,
) -> None:
    """Show the result of each step for sample documents, as JSON. Writes nothing.

    Example: `millrace pipelines show flights.yaml samples.jsonl`
    """
    from millrace.flows.records import Record
    from millrace.flows.transform.transform import Transform

    made = Transform(_pipeline(file, config))
    found: list[dict[str, Any]] = []
    for place, line in enumerate(samples.read_bytes().splitlines()):
        sample = made.show(Record("sample", 0, place, f"sample-{place}".encode(), line, 0))
        found.append(sample._asdict() | {"steps": [step._asdict() for step in sample.steps]})
    print_json(found)


@app.command()
def redrive(
    context: JsonContext,
    file: Declaration,
    config: Config = None,
    step: Annotated[str, typer.Option(metavar="NAME", help="Only what failed in this step.")] = "",
    kind: Annotated[str, typer.Option(metavar="KIND", help="Only failures of this kind, such as CAST.")] = "",
    again: Annotated[bool, typer.Option("--again", help="From the beginning: what was redriven before, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
) -> None:
    """Send the records of the error topic through the pipeline again, as it is declared now.

    Repeating it is idempotent.

    Example: `millrace pipelines redrive flights.yaml --step 0.cast --dry-run`
    """
    from millrace.flows.errors.redrive import redrive as redriven
    from millrace.flows.errors.selection import Selection

    chosen = Selection(step=step, kind=kind)
    report = redriven(context.settings, _pipeline(file, config), chosen, again=again, dry_run=dry_run)
    print_facts(report._asdict(), as_json=context.as_json)


def _pipeline(file: Path, config: Path | None) -> Pipeline:
    from millrace.flows.declare.configuration import Configuration
    from millrace.flows.declare.file import read_pipeline

    return read_pipeline(file, Configuration() if config is None else Configuration.load(config))
