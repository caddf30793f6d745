"""One running system for the tests of a file: Airflow, the log and the streaming job, on a data folder of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.system import Airflow, System


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Airflow]]:
    """A system that is up, with small files of the log, so that a truncation has something to give up."""
    roots = str(tmp_path_factory.getbasetemp())
    data = tmp_path_factory.mktemp("system") / "data"
    system = System(data, log_file_bytes=1 << 20, load_roots=roots, backup_roots=roots)
    try:
        yield system, system.up()
    finally:
        system.installation.stop()


@pytest.fixture(scope="module")
def system(running: tuple[System, Airflow]) -> System:
    return running[0]


@pytest.fixture(scope="module")
def airflow(running: tuple[System, Airflow]) -> Airflow:
    return running[1]
