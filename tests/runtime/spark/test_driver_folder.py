"""Temporary folders of Spark drivers: they go with their drivers, however these ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millrace.base.settings import Settings
from millrace.runtime.spark.driver_folder import make_driver_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER = """
import sys
from millrace.base.settings import Settings
from millrace.runtime.spark.driver_folder import make_driver_folder
print(make_driver_folder(Settings.load()), flush=True)
sys.stdin.read()
"""


def _driver(settings: Settings) -> tuple[subprocess.Popen[str], Path]:
    environment = {**os.environ, **settings.environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "environment").mkdir()
    (folder / "environment" / "library").write_bytes(b"." * 1000)
    return process, folder


def _entries(settings: Settings) -> set[str]:
    return {each.stem for each in (settings.data_dir / "spark" / "drivers").iterdir()} - {"guard"}


def test_a_killed_driver_s_folder_goes_with_the_next_driver_and_those_of_live_ones_stay(settings: Settings) -> None:
    settings.data_dir.mkdir()
    alive, folder = _driver(settings)
    try:
        for _ in range(3):
            killed, left = _driver(settings)
            assert _entries(settings) == {folder.name, left.name}, "nothing adds up"
            with killed:
                os.kill(killed.pid, signal.SIGKILL)
            assert (left / "environment" / "library").exists()
        made = make_driver_folder(settings)
        assert made is not None
        assert made.stat().st_mode & 0o077 == 0
        assert _entries(settings) == {folder.name, made.name}
        assert (folder / "environment" / "library").exists()
    finally:
        with alive:
            alive.kill()


def test_without_a_data_folder_there_is_none_and_none_is_made(settings: Settings) -> None:
    assert make_driver_folder(settings) is None
    assert not settings.data_dir.exists()


@pytest.mark.spark
def test_spark_puts_its_temporary_files_there(spark: SparkSession) -> None:
    from pyspark import SparkFiles

    properties = spark._jvm.java.lang.System  # type: ignore[union-attr]
    folder = Path(properties.getProperty("java.io.tmpdir"))
    assert folder.parent.parts[-2:] == ("spark", "drivers")
    assert folder in Path(SparkFiles.getRootDirectory()).parents
    assert {each.name.partition("-")[0] for each in folder.iterdir()} >= {"spark", "blockmgr"}
