"""The Spark session of Millrace's jobs, tests and tools: Delta, sized for the local cores, with this Python."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from millrace.base.files import make_folder, replace_file
from millrace.base.package import ROOT
from millrace.base.settings import TASK_DRIVER, TASK_FOLDER, Settings
from millrace.runtime.java import find_java
from millrace.runtime.spark.driver_folder import make_driver_folder
from millrace.runtime.spark.jars import session_jars
from millrace.runtime.spark.masters import master_properties, user_properties
from millrace.storage.store import store_at

_PACKAGE_ROOT = str(ROOT)
_LOGGING = Path(__file__).with_name("log4j2.properties")

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LIGHT_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options for a JVM that only plans and does bookkeeping. Its optimising compiler took a fifth of a core in the first
minutes of a streaming job and gained nothing, since Python processes the rows."""

TIDY_SECONDS = 900
"""Between two looks of Spark at the state of streams in an object store, instead of a minute: it lists each partition
twice, however idle the stream is. A restart reads the state's changes since the last look."""
_UNPACKED = "environment"
"""Folder of the unpacked environment in an executor's folder."""
_PYTHON = "millrace-python"
"""Name of the environment's Python (tools/pack_environment.sh)."""


def spark_configuration(settings: Settings, *, light_jvm: bool = False) -> dict[str, str]:
    """Return Spark's configuration for `settings`. Sizes fit the cores; Spark's defaults fit a cluster.

    Raises InvalidSettings.
    """
    cores, given = str(settings.cores), user_properties(settings)
    java_options = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
    return {
        **master_properties(settings, given),
        **_tables(settings),
        "spark.driver.memory": settings.spark_memory,
        _JAVA_OPTIONS: f"{java_options} {_LIGHT_JVM}" if light_jvm else java_options,
        "spark.jars": ",".join(session_jars(settings)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.warehouse.dir": str(settings.data_dir / "spark" / "warehouse"),
        # Hadoop gives files modes of its own, whatever the process's umask is.
        "spark.hadoop.fs.permissions.umask-mode": "077",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": cores,
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": cores,
        "spark.databricks.delta.snapshotPartitions": cores,
        "spark.speculation": "false",  # each attempt writes files of its own name; a concurrent second one is waste
        "spark.python.worker.reuse": "true",
        # A JVM on a busy machine may answer its worker late; the default of 15 s would fail the query.
        "spark.python.authenticate.socketTimeout": "120s",
        **_code(settings),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.enabled": str(settings.spark_ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        **given,
    }


def _tables(settings: Settings) -> dict[str, str]:
    """Return how Spark reaches the tables' object store, for readers that name a table by its URI alone.

    Streams have their state there, which Spark tidies by listing it again and again.
    """
    if not settings.tables.startswith("s3://"):
        return {}
    found = {f"spark.hadoop.{name}": value for name, value in store_at(settings.tables).spark_options.items()}
    return found | {"spark.sql.streaming.stateStore.maintenanceInterval": f"{TIDY_SECONDS}s"}


def _code(settings: Settings) -> dict[str, str]:
    """Return how executors get Python and Millrace: from the driver's paths, or unpacked from an environment.

    Then their tasks have a data folder of their own, in the executor's folder, which Spark removes.
    """
    if not settings.spark_environment:
        return {"spark.executorEnv.PYTHONPATH": _python_path()}
    return {
        "spark.archives": f"{settings.spark_environment}#{_UNPACKED}",
        "spark.executorEnv.PATH": f"./{_UNPACKED}/bin:{os.defpath}",
        f"spark.executorEnv.{TASK_FOLDER}": "./tasks",
    }


def _make_python(settings: Settings) -> str:
    """Return the program that runs Python in the driver's planners and in executors: a path, or a name on their PATH.

    Spark has one name for both. Executors find it in the unpacked environment, the driver in a folder of its own.
    """
    if not settings.spark_environment:
        return sys.executable
    program = settings.data_dir / "spark" / "bin" / _PYTHON
    make_folder(program.parent)
    replace_file(program, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o700)
    folder = str(program.parent)
    others = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != folder]
    os.environ["PATH"] = os.pathsep.join([folder, *others])
    return _PYTHON


def session(
    app_name: str,
    *,
    settings: Settings | None = None,
    light_jvm: bool = False,
    extra: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the Spark session of this process, and start it if there is none.

    `settings` defaults to those of the environment; `extra` overrides Millrace's Spark configuration.
    `light_jvm` is for a driver whose JVM handles few rows itself or ends soon: it starts and plans with less CPU and
    scans many rows more slowly.
    Sets JAVA_HOME, SPARK_HOME, PYTHONPATH and the Python of Spark in the environment of this process, because the JVM
    and its Python workers read them only there. The JVM's temporary files are in the data folder, if there is one.
    Raises InvalidSettings if Java or Delta's jars are unavailable.
    """
    settings = settings or Settings.load()
    spark_home = find_spec("pyspark")
    assert spark_home is not None
    assert spark_home.origin is not None
    os.environ["SPARK_HOME"] = str(Path(spark_home.origin).parent)
    os.environ["JAVA_HOME"] = str(find_java())
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYSPARK_PYTHON"] = _make_python(settings)
    os.environ["PYTHONPATH"] = _python_path()
    if settings.spark_environment:
        os.environ[TASK_DRIVER] = "1"  # Spark gives the executors' variables to the driver's Python workers too
    builder = SparkSession.builder.appName(app_name)
    found = {**spark_configuration(settings, light_jvm=light_jvm), **(extra or {})}
    if SparkContext._gateway is None and (folder := make_driver_folder(settings)) is not None:
        found[_JAVA_OPTIONS] += f' "-Djava.io.tmpdir={folder}"'
    for key, value in found.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextmanager
def logged_session(
    app_name: str,
    settings: Settings,
    log_file: Path,
    *,
    light_jvm: bool = False,
    extra: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """Yield a :func:`session` whose JVM and Python workers write their output to a file, and stop it."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(2)
    with log_file.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        spark = session(app_name, settings=settings, light_jvm=light_jvm, extra=extra)
        try:
            yield spark
        finally:
            spark.stop()
    finally:
        os.dup2(before, 2)
        os.close(before)


def _python_path() -> str:
    """Return PYTHONPATH with this package's root first."""
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join([_PACKAGE_ROOT, *(part for part in inherited if part != _PACKAGE_ROOT)])
