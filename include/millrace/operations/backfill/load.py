"""A load: check and stage the rows of files, then append Import messages that name them.

Staging reads every row before anything is appended. The rows pass neither the log nor the append host. Each slice is
one message on its VChannel (millrace.operations.backfill.importer), so its rows become visible together. Repeating a
load is idempotent.
"""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.file_staging import stage_files
from millrace.operations.backfill.importer import append_imports
from millrace.operations.operation import OperationReport, counted
from millrace.runtime.progress import Progress


class LoadedSlice(OperationReport):
    """One loaded slice."""

    number: int
    vchannel: str
    rows: int
    time_tick: int
    """Tick from which its rows are visible."""


class LoadReport(OperationReport):
    """The result of a load."""

    import_id: str
    collection: str
    dry_run: bool
    slices: int
    rows: int
    loaded: list[LoadedSlice]
    time_tick: int
    """Tick from which all rows are visible. 0: nothing was appended."""

    @property
    def sentence(self) -> str:
        rows = f"{counted(self.rows, 'row')} in {counted(self.slices, 'slice')}"
        if self.dry_run:
            return f"{rows} fit {self.collection}; nothing was loaded."
        return f"{rows} were loaded into {self.collection}."


def run(settings: Settings, params: LoadParams, progress: Progress) -> LoadReport:
    """Stage the files and append their slices. With `dry_run`, only check the files.

    Raises InvalidArgument if a row, a file or a partition does not fit (nothing is appended then), CollectionNotFound,
    AppendRejected if the chain rejects a message, LogUnavailable.
    """
    with connect(settings=settings) as db:
        manifest = stage_files(settings, params, db.definition(params.collection), progress)
        loaded = [] if params.dry_run else append_imports(db, manifest, progress=progress)
    return LoadReport(
        import_id=manifest.import_id,
        collection=manifest.collection,
        dry_run=params.dry_run,
        slices=len(manifest.slices),
        rows=manifest.rows,
        loaded=[
            LoadedSlice(number=each.number, vchannel=each.vchannel, rows=each.rows, time_tick=each.time_tick)
            for each in loaded
        ],
        time_tick=max((each.time_tick for each in loaded), default=0),
    )
