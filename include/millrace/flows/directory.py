"""The flows of a data folder, whichever host runs them: declared streams, and pipelines that ran or are deployed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.base.errors import InvalidArgument, InvalidStream, PipelineBusy, PipelineNotFound, StreamNotFound
from millrace.base.settings import Settings
from millrace.flows.declare.discovery import declared_streams
from millrace.flows.declare.stream import Stream
from millrace.flows.spark_host import status as streams
from millrace.flows.status import FlowStatus

if TYPE_CHECKING:
    from millrace.flows.declare.pipeline import Pipeline

SUFFIXES = (".yaml", ".yml", ".json")
"""Of a file that declares a pipeline."""


@dataclass(frozen=True)
class Flow:
    """A flow that somebody named: a declared stream, or a pipeline with the file that declares it."""

    name: str
    stream: Stream | None = None
    file: Path | None = None
    config: Path | None = None
    managed: bool = False
    """Whether the pipeline service starts and stops it."""

    def pipeline(self, settings: Settings) -> Pipeline:
        """Read the pipeline's declaration. Raises PipelineInvalid, InvalidSettings, PipelineNotFound."""
        from millrace.flows.declare.configuration import Configuration
        from millrace.flows.declare.file import read_pipeline
        from millrace.flows.declare.keys import Keys

        if self.file is None:
            raise PipelineNotFound(f"it is not known which file declares the pipeline {self.name!r}: name the file")
        defaults = Configuration() if self.config is None else Configuration.load(self.config)
        return read_pipeline(self.file, defaults, keys=Keys(settings.data_dir))

    def require_own(self, command: str) -> None:
        """Raise PipelineBusy if the pipeline service manages it."""
        if self.managed:
            raise PipelineBusy(
                f"the pipeline service manages {self.name!r}: use `millrace flows service {command} {self.name}`"
            )


def flow_statuses(settings: Settings, *, without: AbstractSet[str] = frozenset()) -> list[FlowStatus]:
    """Return the status of each flow, by name, but for the pipelines `without`.

    Raises InvalidStream if a declaration cannot be read.
    """
    from millrace.flows.range_host import observed

    names = [each for each in observed.pipelines_here(settings) if each not in without]
    pipelines = [observed.flow_status(settings, each) for each in names]
    return sorted([*streams.flow_statuses(settings), *pipelines], key=lambda each: (each.name, each.host))


def status_of(settings: Settings, flow: Flow) -> FlowStatus:
    """Return the status of one flow."""
    from millrace.flows.range_host import observed

    if flow.stream is not None:
        return streams.flow_status(settings, flow.stream)
    return observed.flow_status(settings, flow.name)


def find_flow(settings: Settings, text: str, *, config: Path | None = None) -> Flow:
    """Return the flow that `text` names: a declared stream, a pipeline that has run here, or a pipeline's file.

    `config` has the defaults of a file's declaration. Raises StreamNotFound, InvalidStream, PipelineInvalid,
    InvalidSettings, and InvalidArgument if a stream and a pipeline have that name.
    """
    if text.endswith(SUFFIXES) or "/" in text:
        return _of_file(settings, Path(text), config)
    from millrace.flows.range_host import observed
    from millrace.flows.range_host.status import declaration_path

    problem: InvalidStream | None = None
    try:
        known = declared_streams(settings)
    except InvalidStream as error:
        known, problem = {}, error
    pipelines = observed.pipelines_here(settings)
    if text in known and text in pipelines:
        raise InvalidArgument(f"a stream and a pipeline are named {text!r}: rename one, or name the pipeline's file")
    if text in known:
        return Flow(text, stream=known[text])
    if text in pipelines:
        noted = observed.read_flow(settings, text)
        file = Path(noted["file"]) if noted.get("file") else None
        where = Path(noted["config"]) if noted.get("config") else None
        return Flow(text, file=file, config=config or where, managed=declaration_path(settings, text).exists())
    if problem is not None:
        raise problem
    names = ", ".join(sorted([*known, *pipelines])) or "none"
    raise StreamNotFound(
        f"no flow {text!r} is declared or has run here; there are {names}. A pipeline's file is named"
        " with its ending, such as flights.yaml"
    )


def _of_file(settings: Settings, file: Path, config: Path | None) -> Flow:
    from millrace.flows.range_host.status import declaration_path

    flow = Flow("", file=file, config=config)
    name = flow.pipeline(settings).id
    return Flow(name, file=file, config=config, managed=declaration_path(settings, name).exists())
