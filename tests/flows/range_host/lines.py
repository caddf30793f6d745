"""A pipeline without brokers: the lines of files, by the example source, into a sink that a test gives."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.range_host import definition, task
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.positions import Position, positions_of
from millrace.flows.records import Failure, Record
from millrace.flows.sinks.sink import Verdicts
from millrace.flows.sources.source import Limits
from millrace.pipelines.declaration import pipeline_of

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "lines_source"))
from millrace_lines_source import Folder, Lines

Write = Callable[[Batch], Verdicts]


class Into:
    """A sink that a function is, opened for each task."""

    def __init__(self, write: Write) -> None:
        self.write = write

    def check(self, schema: pa.Schema, /) -> None:
        """Take any."""

    def open(self) -> None:
        """There is nothing to reach."""

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """There is nothing to release."""


class Letters:
    """A place of letters."""

    def __init__(self, keep: Callable[[Failure], None]) -> None:
        self._keep = keep

    def put(self, failures: Sequence[Failure], *, task: str) -> None:
        for each in failures:
            self._keep(each)

    def close(self) -> None:
        """There is nothing to release."""


class LinesFlow:
    """The flow ``lines`` over files of a folder."""

    def __init__(
        self, folder: Path, write: Write, *, letter: Callable[[Failure], None] | None = None, **declared: Any
    ) -> None:
        self.folder, self.write = folder / "in", write
        self.folder.mkdir(exist_ok=True)
        self.settings = Settings(data_dir=folder / "data")
        self.letters: list[Failure] = []
        self.letter = self.letters.append if letter is None else letter
        brokers = ["127.0.0.1:1"]
        self.declared: dict[str, Any] = {
            "id": "lines",
            "source": {"kind": "kafka", "bootstrap": brokers, "topics": ["a"]},
            "sink": {"kind": "kafka", "bootstrap": brokers, "topic": "b", "ids": "position"},
            **declared,
        }

    def fill(self, numbers: Iterable[int], name: str = "a") -> None:
        """Append a document for each number to a lane's file."""
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps({"n": number}) + "\n" for number in numbers)

    def records(self, name: str = "a") -> Sequence[Record]:
        """The records of a lane."""
        (batch,) = Lines(self.folder / f"{name}.jsonl").batches(0, 1 << 30, Limits(1_000, 1 << 30, 1.0))
        return batch.records or ()

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        """Read the files, and write into the given sink."""
        patched.setattr(definition, "places_of", lambda *_: Folder(self.folder))
        patched.setattr(definition, "feeder_of", lambda *_, **__: None)
        patched.setattr(definition, "require_no_loop", lambda _: None)
        patched.setattr(definition, "ensure_errors", lambda *_: None)
        patched.setattr(definition, "sink_of", lambda *_, **__: Into(self.write))
        patched.setattr(task, "sink_of", lambda *_, **__: Into(self.write))
        patched.setattr(task, "errors_of", lambda *_: Letters(self.letter))
        patched.setattr(task, "reader_of", lambda *_, topic, **__: Lines(self.folder / f"{topic}.jsonl"))

    def run(self, *, own_process: bool = False) -> None:
        """Run to the present end, or until a lane fails for now."""
        with pytest.MonkeyPatch.context() as patched:
            self.patch(patched)
            made = pipeline_of(self.declared)
            run(FlowRun(self.settings, made), stop=threading.Event(), until_end=True, own_process=own_process)

    @property
    def positions(self) -> dict[str, Position]:
        return positions_of(self.settings, "lines")


def numbers(batch: Batch) -> list[int]:
    """The documents' numbers."""
    return [json.loads(each.body or b"{}")["n"] for each in batch.documents or ()]
