"""A source of your own: a folder of files of JSON lines, one lane a file; a line's position is its first byte.

source: {kind: lines, folder: /var/log/app}
"""

from __future__ import annotations

from typing import Literal

from millrace.flows.declare.part import Part, words
from millrace.flows.registry import SourceKind


class LinesSource(Part):
    """Lines of the files of a folder, which only grow."""

    kind: Literal["lines"] = "lines"
    folder: str = words("where the files are, <name>.jsonl each", min_length=1, max_length=4096)
    start: Literal["earliest", "latest"] = words("where a file begins that has no position yet", default="earliest")


_MODULE = "millrace_lines_source.source"
KIND = SourceKind("lines", LinesSource, f"{_MODULE}:source_of", f"{_MODULE}:reader_of", ordered_by_key=False)
