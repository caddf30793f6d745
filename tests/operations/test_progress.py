"""How far an operation is: one file, one line of words, for the terminal, the task's log and the UI."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.client.progress import operation_words
from millrace.runtime.progress import Progress


def test_steps_say_how_many_of_how_many_and_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    shown: list[str] = []

    def show(found: Mapping[str, Any]) -> None:
        shown.append(operation_words(found))

    progress = Progress(tmp_path / "p.json", show=show)
    progress.update("selecting")
    now = 1060.0
    progress.step("checking a", 0, 1200)
    now = 1070.0
    progress.step("checking b", 300, 1200, rows=7)
    assert shown == [
        "selecting",
        "checking a (0 of 1,200 done), 0 %",
        "checking b (300 of 1,200 done), 25 %, 30 s left",
    ]
    value = json.loads((tmp_path / "p.json").read_text())
    assert (value["done"], value["figures"], value["since"]) == (0.25, {"rows": 7}, 1060.0)
    progress.step("verifying x", 0, 4)  # the next part has a time of its own
    now = 1074.0
    progress.step("verifying y", 1, 4)
    assert shown[-1] == "verifying y (1 of 4 done), 25 %, 12 s left"


def test_a_file_of_an_earlier_build_has_words_alone() -> None:
    assert operation_words({"words": "syncing"}) == "syncing"
    assert operation_words({"words": "syncing", "done": 0.5, "at": 3.0}) == "syncing, 50 %"
    assert operation_words({}) == ""
