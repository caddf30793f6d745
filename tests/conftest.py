"""What every test may use: settings in a folder of its own, one Spark session for the run, Hypothesis profiles.

The run itself is tested too: a process that it started, directly or not, and that is still there at its end, fails it.
"""

from __future__ import annotations

import gc
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import hypothesis.internal.conjecture.engine as hypothesis_engine
import psutil
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from millrace.base.settings import PREFIX, TEST_PREFIX, Settings
from tests import prefork, running_brokers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN_MARK = f"{TEST_PREFIX}RUN"
"""In the environment of every process that comes from this test run; never read by Millrace."""

OPEN_FILES = 700
"""At the end of a run, in each of its processes. A descriptor above 1,023 is none for select()."""

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    print_blob=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("soak", print_blob=True, deadline=None, max_examples=5_000)
PROFILE = os.environ.get("TEST_PROFILE", "ci")
"""`quick` (make test) draws a third of the examples of `ci`, for each test; @example cases always run."""
QUICK = PROFILE == "quick"
hypothesis.settings.load_profile("ci" if QUICK else PROFILE)
if QUICK:
    prefork.skip_syncs()
hypothesis_engine.MAX_SHRINKING_SECONDS = 20
"""A failing example is made smaller for so long at most: it has to be shown before the test's time is over (120 s)."""

TOGETHER = {
    "whole systems": ("e2e",),
    "spark": (
        "flows/sources/collection/test_frames.py",
        "docs/test_examples.py",
        "node/flush/test_query.py",
        "node/ingest/test_streaming.py",
        "node/publish/test_published_spark.py",
        "operations/test_backfill.py",
        "operations/test_backup_streams.py",
        "operations/test_on_a_cluster.py",
        "operations/test_compaction_run.py",
        "operations/test_quality_run.py",
        "operations/test_restore.py",
        "flows/range_host/test_on_a_cluster.py",
        "flows/range_host/test_on_spark.py",
        "flows/range_host/test_spark_kills.py",
        "runtime/spark/test_driver_folder.py",
        "runtime/spark/test_dynamic_allocation.py",
        "runtime/spark/test_executor_pods.py",
        "runtime/test_launch_on_a_cluster.py",
        "storage/test_published_spark.py",
        "flows/spark_host/test_keyed.py",
        "flows/spark_host/test_micro_batches.py",
        "flows/spark_host/test_on_a_cluster.py",
        "flows/spark_host/test_operated.py",
        "flows/spark_host/test_running.py",
        "flows/spark_host/test_topics.py",
        "streams/operators/test_on_spark.py",
        "streams/test_joins_page.py",
        "flows/sources/collection/test_named_format.py",
        "tables/read/test_spark.py",
        "tables/wal/test_table.py",
        "test_spark.py",
    ),
    "airflow": ("dags", "plugins"),
    "brokers": (
        "conformance",
        "flows/kafka",
        "flows/sinks",
        "flows/sources/kafka",
        "flows/sources/mariadb",
        "flows/test_mixed_flows.py",
        "crash/test_log_switch",
        "crash/test_operate_kills.py",
        "log/kafka/test_markers.py",
        "log/kafka/test_partitions.py",
        "log/kafka/test_records.py",
        "log/kafka/test_service.py",
        "log/pulsar/test_service.py",
        "pipelines/deploy/test_real_kafka.py",
        "pipelines/store",
        "flows/range_host",
        "flows/errors",
    ),
}
"""Folders and modules whose tests share something that is slow to start: each group stays in one process."""


def _group(path: str) -> str:
    """The group of a module's path below tests/; that of itself alone where it shares nothing."""
    return next((name for name, paths in TOGETHER.items() if path.startswith(paths)), path)


class _Groups(LoadScopeScheduling):
    """xdist's scheduler, by those groups."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0].removeprefix("tests/"))


# Until all is collected: modules and tests are never garbage, and looking for it takes a fifth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """A process of several has a main module without a file, where pyspark takes itself for a doctest and exits."""
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__"):
        main.__file__ = str(Path(pytest.__file__).with_name("__main__.py"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Who runs what, in a run of several processes (pytest -n 2)."""
    config.option.loadscopereorder = False
    return _Groups(config, log)


def _mark_cases(items: list[pytest.Item]) -> None:
    """Leave `quick_cases(n)` of a test's cases quick, spread over all of them; the others are slow."""
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("slow"):
            cases.setdefault(getattr(item, "function", None), []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("quick_cases")
        assert marker is not None
        quick = {at * len(found) // marker.args[0] for at in range(marker.args[0])}
        for at, item in enumerate(found):
            if at not in quick:
                item.add_marker(pytest.mark.slow)


def _draw_fewer(item: pytest.Item) -> None:
    """Draw a third of the examples, two at least."""
    for owner, name in (
        (getattr(item, "function", None), "_hypothesis_internal_use_settings"),
        (getattr(item, "cls", None), "settings"),  # of a stateful test
    ):
        found = getattr(owner, name, None)
        if isinstance(found, hypothesis.settings) and id(found) not in _FEWER:
            most = found.max_examples
            fewer = hypothesis.settings(found, max_examples=min(most, max(2, most // 3)))
            _FEWER[id(fewer)] = fewer
            setattr(owner, name, fewer)


_FEWER: dict[int, hypothesis.settings] = {}
"""Settings made by `_draw_fewer`, by identity: a test with several cases has them once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases beyond `quick_cases` slow, draw fewer examples where the profile says so, and sort by groups.

    The groups come first, so that none is left for the end, when there is nothing to do beside it.
    """
    _mark_cases(items)
    if QUICK:
        for item in items:
            _draw_fewer(item)
    here = Path(__file__).parent
    order = {name: place for place, name in enumerate(TOGETHER)}
    groups = {path: _group(path.relative_to(here).as_posix()) for path in {item.path for item in items}}
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()) and groups[item.path] != "spark":
            raise pytest.UsageError(f"{item.path} uses the Spark session: name it in TOGETHER in tests/conftest.py")
    items.sort(key=lambda item: order.get(groups[item.path], len(order)))


def _processes_of_this_run(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_MARK) == mark:
                found.append(process)
        except psutil.Error:  # gone meanwhile, or not ours
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_run() -> Iterator[None]:
    """Settings come from the tests alone, and when the run's last fixture is gone, no process and few open files are
    left.
    """
    for variable in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[variable]
    mark = uuid.uuid4().hex
    os.environ[RUN_MARK] = mark
    with prefork.servers() if QUICK else nullcontext():
        yield
    running_brokers.stop_all()
    gc.collect()
    me = psutil.Process()
    number, paths = me.num_fds(), [each.path for each in me.open_files()]
    _, alive = psutil.wait_procs(_processes_of_this_run(mark), timeout=15)
    left = [
        f"{process.pid} {' '.join(process.cmdline()) or process.name()}" for process in alive if process.is_running()
    ]
    for process in alive:
        process.kill()
    assert not left, "processes outlived the test run:\n" + "\n".join(left)
    assert number < OPEN_FILES, f"{number} files are open at the end of the run; regular ones: {sorted(paths)[:100]}"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with an empty data folder; the cache folder is the user's, so that jars are fetched once."""
    return Settings(data_dir=tmp_path / "data", spark_cores=2)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of a test run, as the jobs have it. Mark tests that use it `spark`."""
    from pyspark import SparkContext

    from millrace.runtime.spark.session import session

    data = tmp_path_factory.mktemp("spark-session")
    spark = session("millrace-tests", settings=Settings(data_dir=data, spark_cores=2), light_jvm=True)
    gateway = SparkContext._gateway
    assert gateway is not None
    yield spark
    spark.stop()
    # The JVM would stay until Python ends: it leaves when its standard input closes.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=30)
    SparkContext._gateway = SparkContext._jvm = None
