"""A pipeline's worker: one run id for each pipeline, started, queried and stopped through the launcher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.control import start_workers, stop_flow
from millrace.flows.declare.file import with_sealed
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.keys import Keys
from millrace.flows.declare.part import expanded
from millrace.flows.range_host.documents import forget_documents
from millrace.flows.range_host.observed import note_flow, observed, run_id
from millrace.flows.range_host.positions import forget_positions
from millrace.flows.range_host.status import PipelineStatus, declaration_path, flow_folder
from millrace.flows.range_host.supervision import want
from millrace.flows.registry import release
from millrace.flows.sinks.collection.lane import forget_lanes
from millrace.flows.sources.capture.shared_spool import forget_spool
from millrace.flows.status import FlowState, processes_of, supervised_folder
from millrace.pipelines.declaration import as_pipeline, pipeline_of
from millrace.pipelines.store.store import PipelineStore
from millrace.runtime.launch.launcher import RunStatus


class Deployment:
    """The workers of one data folder. Stateless."""

    def __init__(self, settings: Settings, *, config: Path | None = None) -> None:
        """`config` is the pipeline-config.yaml that workers read (for their log), instead of the settings' own."""
        self._settings = settings
        self._config = config or (Path(settings.pipeline_config) if settings.pipeline_config else None)
        self._keys = Keys(settings.data_dir)

    def write(self, pipeline: Flow) -> None:
        """Write the declaration to its worker's file, readable by its owner only. Raises InvalidSettings."""
        path = declaration_path(self._settings, pipeline.name)
        replace_json(path, with_sealed(as_pipeline(pipeline), pipeline.secrets(), self._keys), synced=True)
        note_flow(self._settings, pipeline, file=path, config=self._config)

    def seal_anew(self, store: PipelineStore) -> None:
        """Seal the secrets of existing files by the newest key, since supervisors restart workers from them.

        Raises SecretUnreadable.
        """
        for record in store.all():
            path = declaration_path(self._settings, record.id)
            if path.exists():
                known = json.loads(path.read_text(encoding="utf-8"))
                opened = expanded(known, env={}, unseal=self._keys.decrypt)
                self.write(pipeline_of(opened, compiled=False))

    def start(self, pipeline: str) -> RunStatus:
        """Start its worker, or find it running."""
        return start_workers(self._settings, pipeline, declaration_path(self._settings, pipeline), config=self._config)

    def stop(self, pipeline: str) -> None:
        """Stop its worker between two micro-batches. No effect if there is none."""
        stop_flow(self._settings, run_id(pipeline))

    def ask(self, pipeline: str, *, paused: bool | None = None, restart: str = "") -> None:
        """Command its worker to pause, to resume, or to restart tasks."""
        want(self._settings, pipeline, paused=paused, restart=restart)

    def running(self, pipeline: str) -> bool:
        """Return whether the supervisor of the pipeline's worker runs."""
        return processes_of(self._settings, run_id(pipeline)).active

    def gave_up(self, pipeline: str) -> bool:
        """Return whether the worker's supervisor ended on its own, because the worker died too often."""
        run = processes_of(self._settings, run_id(pipeline))
        return run.state is FlowState.FAILED and not run.active

    def status(self, pipeline: str) -> PipelineStatus:
        """Return the worker's last status; without a worker it is STOPPED, or FAILED with the end of its run."""
        return observed(self._settings, pipeline)

    def release(self, pipeline: Flow) -> None:
        """Remove what its stopped worker created at its source, such as a replication slot.

        Raises InvalidSettings, LogUnavailable.
        """
        release(pipeline.source, self._settings, group=pipeline.consumer_group)

    def remove(self, pipeline: str) -> None:
        """Stop its worker, remove its folder and documents, its tasks' positions and the journals of its lanes.

        Raises CommitFenced, TableUnavailable, MetaUnavailable.
        """
        self.stop(pipeline)
        forget_positions(self._settings, pipeline)
        forget_lanes(self._settings, pipeline)
        forget_documents(self._settings, pipeline)
        forget_spool(self._settings, f"millrace-{pipeline}")
        shutil.rmtree(supervised_folder(self._settings, run_id(pipeline)), ignore_errors=True)
        shutil.rmtree(flow_folder(self._settings, pipeline), ignore_errors=True)
