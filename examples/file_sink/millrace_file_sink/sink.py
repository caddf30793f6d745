"""What the kind does. Imported where a worker runs, not where a declaration is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from millrace.base.errors import SinkBusy
from millrace.base.files import make_folder, replace_file
from millrace.flows.batch import Batch
from millrace.flows.sinks.sink import Verdicts

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace.base.settings import Settings
    from millrace.flows.sinks.models import Flush
    from millrace_file_sink import FileSink


class Files:
    """Writes the documents of a batch to one file, whose name is the batch's range."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, schema: pa.Schema, /) -> None:
        """Documents have no columns."""

    def open(self) -> None:
        """Create the folder."""
        make_folder(self._folder)

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return nothing: the runner has the positions."""
        return {}

    def write(self, batch: Batch, /) -> Verdicts:
        """Write a file and its name durably, in place of one of the same range."""
        documents = batch.documents or ()
        lines = [each.body for each in documents if each.body is not None]
        path = self._folder / quote(batch.lane, safe="") / f"{batch.start:020d}-{batch.end:020d}.jsonl"
        try:
            replace_file(path, b"".join(line + b"\n" for line in lines), synced=True)
        except OSError as error:
            raise SinkBusy(f"{path}: {error}", retry_after=5.0) from None
        return Verdicts(acknowledged=len(documents), bulks=1)

    def close(self) -> None:
        """There is nothing to release."""


def made(declared: FileSink, settings: Settings, *, flow: str, flush: Flush) -> Files:
    """Return the sink that flow `flow` declares."""
    return Files(Path(declared.folder) / flow)
