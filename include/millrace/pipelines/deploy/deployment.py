"""A pipeline's worker: one run id for each pipeline, started, queried and stopped through the launcher."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import RunNotFound
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import sealed
from millrace.flows.declare.keys import Keys
from millrace.flows.declare.part import expanded
from millrace.flows.declare.pipeline import Pipeline
from millrace.flows.range_host.positions import forget_positions
from millrace.flows.range_host.status import PipelineStatus, State, declaration_path, pipeline_folder
from millrace.flows.range_host.supervision import End, last_pulse, read_end, read_status, want
from millrace.flows.range_host.supervisor import SILENT_SECONDS
from millrace.pipelines.store.store import PipelineStore
from millrace.runtime.launch.command import module_job
from millrace.runtime.launch.launcher import Launcher, RunState, RunStatus

QUIET_SECONDS: Final = 10.0
"""A worker that has not spoken for so long is shown so; it speaks once a second."""


def run_id(pipeline: str) -> str:
    return f"pipeline-{pipeline}"


def with_secrets(pipeline: Pipeline, keys: Keys) -> dict[str, Any]:
    """The declaration as its worker reads it, secrets in their places, sealed by `keys`."""
    found = pipeline.to_json()
    for path, text in pipeline.secrets().items():
        place = found
        *folders, last = path.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = sealed(keys.encrypt(text))
    return found


class Deployment:
    """The workers of one data folder. Holds nothing itself."""

    def __init__(self, settings: Settings, *, config: Path | None = None) -> None:
        """`config`: the pipeline-config.yaml that workers read (how they log), in place of the settings' own."""
        self._settings = settings
        self._config = config or (Path(settings.pipeline_config) if settings.pipeline_config else None)
        self._launcher = Launcher(settings)
        self._keys = Keys(settings.data_dir)

    def write(self, pipeline: Pipeline) -> None:
        """Put the declaration where its worker reads it at its start, for its owner alone. Raises InvalidSettings."""
        replace_json(declaration_path(self._settings, pipeline.id), with_secrets(pipeline, self._keys), synced=True)

    def seal_anew(self, store: PipelineStore) -> None:
        """Seal the secrets of existing files with the newest key: supervisors restart workers from them.

        Raises SecretUnreadable.
        """
        for record in store.all():
            path = declaration_path(self._settings, record.id)
            if path.exists():
                known = json.loads(path.read_text(encoding="utf-8"))
                opened = expanded(known, env={}, unseal=self._keys.decrypt)
                self.write(Pipeline.parse(opened, compiled=False))

    def start(self, pipeline: str) -> RunStatus:
        """Start its worker, or find it running."""
        command = [str(declaration_path(self._settings, pipeline))]
        command += [] if self._config is None else ["--config", str(self._config.absolute())]
        job = module_job("pipeline", "millrace.pipelines.deploy", *command)
        return self._launcher.start(run_id(pipeline), job)

    def stop(self, pipeline: str) -> None:
        """End its worker between two micro-batches; no effect where there is none."""
        with suppress(RunNotFound):
            self._launcher.stop(run_id(pipeline))

    def ask(self, pipeline: str, *, paused: bool | None = None, restart: str = "") -> None:
        """Have its worker pause, go on, or start tasks again."""
        want(self._settings, pipeline, paused=paused, restart=restart)

    def running(self, pipeline: str) -> bool:
        """Whether its worker's supervisor lives."""
        try:
            return self._launcher.poll(run_id(pipeline)).active
        except RunNotFound:
            return False

    def gave_up(self, pipeline: str) -> bool:
        """Return whether the worker's supervisor ended on its own, because the worker died too often."""
        try:
            return self._launcher.poll(run_id(pipeline)).state is RunState.FAILED
        except RunNotFound:
            return False

    def status(self, pipeline: str) -> PipelineStatus:
        """Return the worker's last status; without a worker it is STOPPED, or FAILED with the end of its run."""
        said = read_status(self._settings, pipeline)
        try:
            run = self._launcher.poll(run_id(pipeline))
        except RunNotFound:
            return said.resting()
        if run.active:
            fresh = said.at >= run.started_at
            said = said if fresh else PipelineStatus(pipeline=pipeline, state=State.UNASSIGNED)
            return self._as_watched(said, run.started_at)
        if run.error is not None:
            return said.resting(State.FAILED, str(run.error))
        return said.resting()

    def _as_watched(self, said: PipelineStatus, begun: float) -> PipelineStatus:
        """Return the status with what its supervisor, started at `begun`, knows: the worker's end, or its silence."""
        end = read_end(self._settings, said.pipeline)
        if end.at < begun:
            end = End()
        told = said.model_copy(update={"restarts": end.ends, "last_end": end.cause})
        if end.at > said.at:  # the next one has not spoken yet
            return told.resting(State.FAILED, f"its worker is started again: {end.cause}")
        spoke = last_pulse(self._settings, said.pipeline)
        silent = time.time() - spoke
        if spoke >= begun and silent > QUIET_SECONDS:
            words = f"its worker has been silent for {silent:.0f} s; after {SILENT_SECONDS:.0f} s it is restarted"
            return told.model_copy(update={"state": State.FAILED, "cause": words})
        return told

    def remove(self, pipeline: str) -> None:
        """Stop its worker, remove its folder and its tasks' positions. Raises CommitFenced, TableUnavailable."""
        self.stop(pipeline)
        forget_positions(self._settings, pipeline)
        shutil.rmtree(pipeline_folder(self._settings, pipeline), ignore_errors=True)
