"""A feeder goes on after whatever ends its engine or its spool, and says why it waits."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import CaptureEnded
from millrace.base.settings import Settings
from millrace.flows.sources.capture import feeder
from millrace.flows.sources.capture.spool import Spool
from tests.waiting import until


@pytest.mark.parametrize("fault", [CaptureEnded("gone"), OSError("no space"), sqlite3.OperationalError("disk full")])
def test_a_fault_of_any_kind_is_noted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    started: list[Any] = []

    def start(*given: Any, **more: Any) -> Any:
        started.append(more)
        raise fault

    monkeypatch.setattr(feeder, "Engine", start)
    monkeypatch.setattr(feeder, "_FIRST_PAUSE", 0.01)
    settings = Settings(data_dir=tmp_path / "data")
    with feeder.Feeder(settings, tmp_path / "spool", tables=["d.t"], properties={}, max_bytes=1):
        until(lambda: len(started) > 2, "it is tried again", seconds=10)
    with Spool(tmp_path / "spool") as spool:
        assert spool.standing().error == str(fault)
