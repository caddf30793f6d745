"""What a sink remembers in its folder, in the form of earlier builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.flows.sinks.memory import Noted, name_in
from millrace.flows.sinks.sink import Verdicts


def test_a_folder_of_an_earlier_build_is_read(tmp_path: Path) -> None:
    (tmp_path / "taken.json").write_text(json.dumps({"batch": 4, "rows": 10, "rejected": 1}))
    (tmp_path / "kafka-stream.json").write_text(json.dumps({"name": "abc"}))
    noted = Noted.load(tmp_path)
    assert noted.again(4) == Verdicts(10, 1, again=True)
    assert noted.again(3) == Verdicts(again=True)
    assert noted.again(5) is None
    assert name_in(tmp_path, "kafka-stream.json") == "abc"


@pytest.mark.parametrize("synced", [True, False])
def test_a_note_replaces_a_longer_one(tmp_path: Path, synced: bool) -> None:
    Noted(10**6, 10**9, 10**9).keep(tmp_path)
    Noted(1, 2, 3).keep(tmp_path, synced=synced)
    assert Noted.load(tmp_path) == Noted(1, 2, 3)
