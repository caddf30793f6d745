"""The flows of a data folder on either host: declared ones, and those of files that ran here or are deployed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.base.errors import InvalidArgument, InvalidStream, PipelineBusy, PipelineNotFound, StreamNotFound
from millrace.base.settings import Settings
from millrace.flows.declare.connections import password_in_environment, with_passwords
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.spark_host import status as streams
from millrace.flows.status import FlowStatus

if TYPE_CHECKING:
    from millrace.flows.declare.flow import Flow

SUFFIXES = (".yaml", ".yml", ".json")
"""Suffixes of files that declare a pipeline."""


@dataclass(frozen=True)
class NamedFlow:
    """A flow found by name: a declared one, or one of a file."""

    name: str
    declared: Flow | None = None
    file: Path | None = None
    config: Path | None = None
    managed: bool = False
    """Whether the pipeline service starts and stops it."""

    @property
    def stream(self) -> Flow | None:
        """The declaration, if it runs on Spark."""
        return self.declared if self.declared is not None and self.declared.host == "spark" else None

    def declaration(self, settings: Settings, *, connections: bool = True) -> Flow:
        """Read the declaration of a flow that does not run on Spark.

        Without `connections`, a declared flow's references to Airflow's connections stay as they are.
        Raises PipelineInvalid, InvalidSettings, PipelineNotFound.
        """
        from millrace.flows.declare.configuration import Configuration
        from millrace.flows.declare.file import flow_of_file, with_defaults
        from millrace.flows.declare.keys import Keys

        defaults = Configuration() if self.config is None else Configuration.load(self.config)
        if self.declared is not None:
            return with_defaults(self.declared, defaults, connections=connections)
        return flow_of_file(self.worker_file(settings), defaults, keys=Keys(settings.data_dir))

    def worker_file(self, settings: Settings, *, password_of: Callable[[str], str] = password_in_environment) -> Path:
        """Return the file that a worker reads. A declared flow is first written to one.

        `password_of` returns the password of an Airflow connection. Raises PipelineNotFound, InvalidSettings.
        """
        if self.declared is not None:
            return write_declared(settings, self.declared, password_of=password_of)
        if self.file is None:
            raise PipelineNotFound(f"the file that declares the pipeline {self.name!r} is unknown: name the file")
        return self.file

    def require_own(self, command: str) -> None:
        """Raise PipelineBusy if the pipeline service manages it."""
        if self.managed:
            raise PipelineBusy(
                f"the pipeline service manages {self.name!r}: use `millrace flows service {command} {self.name}`"
            )


def declared_file(settings: Settings, name: str) -> Path:
    """Return the file by which the worker of a declared flow gets its declaration."""
    from millrace.flows.range_host.status import flow_folder

    return flow_folder(settings, name) / "declared.json"


def write_declared(
    settings: Settings, flow: Flow, *, password_of: Callable[[str], str] = password_in_environment
) -> Path:
    """Write a declared flow to its worker's file, readable by its owner only, with sealed secrets.

    A worker reads it at its start, so a later change takes effect at the next start. Raises InvalidSettings.
    """
    from millrace.base.files import make_folder, replace_json
    from millrace.flows.declare.file import with_sealed
    from millrace.flows.declare.keys import Keys

    path = declared_file(settings, flow.name)
    make_folder(path.parent)
    secrets = with_passwords(flow.secrets(), password_of=password_of)
    replace_json(path, with_sealed(flow.to_json(unset=False), secrets, Keys(settings.data_dir)), synced=True)
    return path


def flow_statuses(settings: Settings, *, without: AbstractSet[str] = frozenset()) -> list[FlowStatus]:
    """Return the status of each flow, ordered by name, except the pipelines `without`.

    Raises InvalidStream if a declaration cannot be read.
    """
    from millrace.flows.range_host import observed

    declared = declared_flows(settings)
    ours = {name: each for name, each in declared.items() if each.host == "range"}
    found = [streams.flow_status(settings, each) for each in declared.values() if each.host == "spark"]
    found += [
        status_of(settings, NamedFlow(name, ours.get(name)))
        for name in sorted({*observed.pipelines_here(settings), *ours})
        if name not in without
    ]
    return sorted(found, key=lambda each: (each.name, each.host))


def status_of(settings: Settings, flow: NamedFlow) -> FlowStatus:
    """Return the status of one flow."""
    from millrace.flows.range_host import observed

    if flow.stream is not None:
        return streams.flow_status(settings, flow.stream)
    found = observed.flow_status(settings, flow.name)
    never_ran = not found.reads and flow.declared is not None
    return observed.with_description(found, flow.declaration(settings, connections=False)) if never_ran else found


def find_flow(settings: Settings, text: str, *, config: Path | None = None) -> NamedFlow:
    """Return the flow that `text` names: a declared one, one of a file that has run here, or a file.

    `config` has the defaults of a file's declaration. Raises StreamNotFound, InvalidStream, PipelineInvalid,
    InvalidSettings, and InvalidArgument if a stream and a pipeline have that name.
    """
    if text.endswith(SUFFIXES) or "/" in text:
        return _of_file(settings, Path(text), config)
    from millrace.flows.range_host import observed
    from millrace.flows.range_host.status import declaration_path

    problem: InvalidStream | None = None
    try:
        known = declared_flows(settings)
    except InvalidStream as error:
        known, problem = {}, error
    pipelines = observed.pipelines_here(settings)
    if text in known and known[text].host == "spark" and text in pipelines:
        raise InvalidArgument(f"a stream and a pipeline are named {text!r}: rename one, or name the pipeline's file")
    if text in known and declaration_path(settings, text).exists():
        raise InvalidArgument(f"the pipeline service manages another flow named {text!r}: rename the declared one")
    if text in known:
        return NamedFlow(text, known[text], config=config or _config(settings))
    if text in pipelines:
        noted = observed.read_flow(settings, text)
        file = Path(noted["file"]) if noted.get("file") else None
        where = Path(noted["config"]) if noted.get("config") else None
        return NamedFlow(text, file=file, config=config or where, managed=declaration_path(settings, text).exists())
    if problem is not None:
        raise problem
    names = ", ".join(sorted([*known, *pipelines])) or "none"
    raise StreamNotFound(
        f"no flow {text!r} is declared or has run here; known flows: {names}. Name a pipeline's file"
        " with its suffix, such as flights.yaml"
    )


def _of_file(settings: Settings, file: Path, config: Path | None) -> NamedFlow:
    from millrace.flows.range_host.status import declaration_path

    flow = NamedFlow("", file=file, config=config)
    name = flow.declaration(settings).name
    return NamedFlow(name, file=file, config=config, managed=declaration_path(settings, name).exists())


def _config(settings: Settings) -> Path | None:
    return Path(settings.pipeline_config) if settings.pipeline_config else None
