"""``millrace pipelines``: run, check, show and redrive a pipeline from its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.base.extras import require_extras
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    AsJson,
    DataFolder,
    command_group,
    load_settings,
    print_facts,
    print_json,
)

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
    file: Declaration,
    config: Config = None,
    until_end: Annotated[bool, typer.Option("--until-end", help="Process the available records, then end.")] = False,
    data: DataFolder = None,
) -> None:
    """Run a pipeline in the foreground until Ctrl-C or SIGTERM. A worker that dies restarts with a back-off.

    Example: `millrace pipelines run flights.yaml`
    """
    from millrace.pipelines.worker.supervisor import supervise

    settings = load_settings(data)
    _pipeline(file, config)  # what is wrong with it is said here, not by a worker that starts again and again
    raise typer.Exit(supervise(settings, file, config=config, until_end=until_end))


@app.command()
def serve(config: Config = None, data: DataFolder = None) -> None:
    """Serve the management API of pipelines (port 13012) and supervise their workers, until Ctrl-C or SIGTERM.

    Example: `millrace pipelines serve --config pipeline-config.yaml`
    """
    from millrace.commands.parts.exec_python import exec_python

    more = [] if config is None else ["--config", str(config.absolute())]
    exec_python(["-m", "millrace.service.pipelines", *more], load_settings(data))


@app.command()
def new_key() -> None:
    """Generate an encryption key for the secrets of pipelines, for MILLRACE_PIPELINE_KEYS.

    Example: `millrace pipelines new-key`
    """
    from millrace.pipelines.store.keys import new_key as made

    typer.echo(made())


@app.command()
def rotate_keys(data: DataFolder = None) -> None:
    """Re-encrypt the secrets of all pipelines with the first key of MILLRACE_PIPELINE_KEYS.

    Example: `millrace pipelines rotate-keys`
    """
    from getpass import getuser

    from millrace.pipelines.deploy.deployment import Deployment
    from millrace.pipelines.store.store import open_pipelines

    settings = load_settings(data)
    with open_pipelines(settings) as store:
        rotated = store.rotate_keys(who=getuser())
        Deployment(settings).seal_anew(store)
    typer.echo(f"{rotated} secrets are encrypted by the first key")


@app.command()
def check(file: Declaration, config: Config = None, as_json: AsJson = False) -> None:
    """Check a declaration without creating or contacting anything.

    Example: `millrace pipelines check flights.yaml`
    """
    from millrace.pipelines.model.part import invalid

    pipeline = _pipeline(file, config)
    if (problem := pipeline.unordered()) is not None:
        raise invalid([problem])
    print_facts(
        {
            "pipeline": pipeline.id,
            "topics": ", ".join(pipeline.topics()["input"]),
            "steps": len(pipeline.steps),
            "sink": pipeline.sink.kind,
            "error topic": pipeline.errors_topic,
        },
        as_json=as_json,
    )


@app.command()
def show(
    file: Declaration,
    samples: Annotated[Path, typer.Argument(metavar="SAMPLES", help="Documents, JSON, one a line.")],
    config: Config = None,
) -> None:
    """Show the result of each step for sample documents, as JSON. Writes nothing.

    Example: `millrace pipelines show flights.yaml samples.jsonl`
    """
    from millrace.pipelines.records import Record
    from millrace.pipelines.transform.transform import Transform

    made = Transform(_pipeline(file, config))
    found: list[dict[str, Any]] = []
    for place, line in enumerate(samples.read_bytes().splitlines()):
        sample = made.show(Record("sample", 0, place, f"sample-{place}".encode(), line, 0))
        found.append(sample._asdict() | {"steps": [step._asdict() for step in sample.steps]})
    print_json(found)


@app.command()
def redrive(
    file: Declaration,
    config: Config = None,
    step: Annotated[str, typer.Option(metavar="NAME", help="Only what failed in this step.")] = "",
    kind: Annotated[str, typer.Option(metavar="KIND", help="Only failures of this kind, such as CAST.")] = "",
    again: Annotated[bool, typer.Option("--again", help="From the beginning: what was redriven before, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Send the records of the error topic through the pipeline again, as it is declared now. Repeating it is idempotent.

    Example: `millrace pipelines redrive flights.yaml --step 0.cast --dry-run`
    """
    from millrace.pipelines.worker.redrive import redrive as redriven
    from millrace.pipelines.worker.selection import Selection

    chosen = Selection(step=step, kind=kind)
    report = redriven(load_settings(data), _pipeline(file, config), chosen, again=again, dry_run=dry_run)
    print_facts(report._asdict(), as_json=as_json)


def _pipeline(file: Path, config: Path | None) -> Any:
    from millrace.pipelines.model.configuration import Configuration
    from millrace.pipelines.worker.declared import read_pipeline

    return read_pipeline(file, Configuration() if config is None else Configuration.load(config))
