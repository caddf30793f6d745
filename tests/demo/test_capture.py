"""The demo of capture: its collections equal the tables, through a kill of each process."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from millrace.base.settings import Settings
from millrace.demo.__main__ import ROOT
from millrace.demo.capture.run import VICTIMS, run_capture


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_collections_equal_their_tables_after_a_kill_of_each_process(tmp_path: Path) -> None:
    settings, said = replace(Settings(), data_dir=tmp_path / "data"), io.StringIO()
    console = Console(file=said, width=120)
    code = run_capture(settings, ROOT, rows=5_000, seconds=20.0, console=console, stop=threading.Event())
    assert code == 0, said.getvalue()
    assert all(f"killed: the {victim}" in said.getvalue() for victim in VICTIMS)
    assert said.getvalue().count("✓ ✓ ✓") == 4, said.getvalue()
    assert "altered in both databases" in said.getvalue()
