"""A sink of your own: a pipeline's documents as files, one for each batch, in a folder for each lane.

sink: {kind: file, folder: /var/documents}
"""

from __future__ import annotations

from typing import Literal

from millrace.flows.declare.part import words
from millrace.flows.registry import SinkKind
from millrace.flows.sinks.models import DocumentSink


class FileSink(DocumentSink):
    """Documents as JSON lines in files."""

    kind: Literal["file"] = "file"
    folder: str = words("where the files go", min_length=1, max_length=4096)


KIND = SinkKind(
    "file",
    FileSink,
    "millrace_file_sink.sink:made",
    "at least once: a range that is cut anew after a crash is in two files",
)
