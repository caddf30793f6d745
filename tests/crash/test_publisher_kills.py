"""Kill -9 of a process that flushes, joins, compacts and publishes, at each of its steps.

Every version that is there is a read at its tick, and the next process continues.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from tests.crash import publisher_process
from tests.node.publish.published_maker import PublishedMaker

POINTS = (
    "publish.planned",
    "publish.checked@2",
    "publish.committed",
    "compact.replaced",
    "flush.rows",
    "publish.vectors",
    "publish.checked",
    "publish.committed@2",
    "publish.planned@3",
    "publish.vectors@2",
    "flush.deletes",
    "flush.checkpoints",
    "compact.written",
    "compact.folded",
)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> PublishedMaker:
    """Published rows, and news of every kind in the WAL."""
    made = PublishedMaker(Settings(data_dir=tmp_path_factory.mktemp("grown") / "data"))
    for number in range(9):
        made.write(range(number, number + 5), f"v{number}")
        made.flush()
        if number < 5:
            made.publish()
    made.write(range(2, 20), "new")
    made.delete([0, 3, 7])
    return made


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_process_leaves_versions_that_are_reads(grown: PublishedMaker, tmp_path: Path, point: str) -> None:
    folder = tmp_path / "data"
    shutil.copytree(grown.settings.data_dir, folder)
    tick = max(map(grown.maker.last_tick, grown.maker.pchannels))
    command = [sys.executable, publisher_process.__file__, str(folder), str(tick)]
    died = subprocess.run(command, env={**os.environ, VARIABLE: point}, capture_output=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    settings, grown.settings = grown.settings, replace(grown.settings, data_dir=folder)
    try:
        _check_all(grown)
        publisher_process.main(str(folder), str(tick))
        _check_all(grown)
    finally:
        grown.settings = settings


def _check_all(made: PublishedMaker) -> None:
    table = made.table()
    assert table is not None
    for version in range(max(1, table.version - 4), table.version + 1):
        made.check(version=version)
