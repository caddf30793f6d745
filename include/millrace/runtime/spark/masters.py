"""Spark's settings for where tasks run: in this process, on a standalone master, on YARN, or on Kubernetes.

Drivers are always in client mode: the driver is the job's process. What only its user knows, such as an image or a
queue, is in a file of Spark's own properties (the setting `spark_properties`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from millrace.base.errors import InvalidSettings
from millrace.base.files import make_folder, replace_file
from millrace.base.settings import Settings

TASK_ATTEMPTS: Final = 3
"""Attempts of one task.

They cover a killed Python worker; an entry that cannot be processed parks its channel instead. On executors that share
no folder there are as many more as executors: one that ends its process is known only where a process ended at it.
"""
IMAGE: Final = "spark.kubernetes.container.image"
SECRET: Final = "spark.millrace.kubernetes.secret"
"""Property that names the Secret with the executors' variables. It is ours: Spark needs a property for each key."""
TEMPLATE: Final = "spark.kubernetes.executor.podTemplateFile"
CONTAINER: Final = "executor"
DYNAMIC: Final = "spark.dynamicAllocation."
"""Prefix of the properties by which a job takes and returns executors as it needs them."""
_IDLE: Final = "300s"
"""Time without a task after which an executor goes although it has cached blocks or shuffle files.

Spark's default is never: a job that cached or shuffled something would return no executor. It is computed again.
"""
_TEMPORARY: Final = "-Djava.io.tmpdir=./tmp"
"""Puts the temporary files of an executor into its folder, which the worker removes; YARN does this itself.

A killed executor leaves the archive that it fetched, 260 MB, and would leave it in ``/tmp``. Spark creates the folder
when it fetches the archive, before the first task.
"""
MAX_BYTES: Final = 1 << 20

_OWN: Final = frozenset(
    {
        "spark.master",
        "spark.submit.deployMode",
        "spark.archives",
        "spark.sql.extensions",
        "spark.sql.catalog.spark_catalog",
        "spark.sql.session.timeZone",
        "spark.speculation",
        "spark.python.worker.reuse",
        "spark.task.maxFailures",
        "spark.kubernetes.executor.podTemplateContainerName",
    }
)
"""Properties on which rows depend."""
_SECRET: Final = re.compile(
    r"(?!spark\.(millrace|kubernetes)\.(?!.*oauthToken$)).*(secret|password|token|access[.-]?key|credential)", re.I
)
"""Names of properties whose values are secrets. Those of Kubernetes name Secrets."""
_LINE: Final = re.compile(r"(?P<key>[^\s=:]+)\s*[\s=:]\s*(?P<value>.*)")


def master_properties(settings: Settings, given: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's properties for the master of `settings`; `given` are its user's (:func:`user_properties`).

    Raises InvalidSettings if the master needs a setting or package that is missing.
    """
    master, cores = settings.spark_master, str(settings.cores)
    if not master:
        if _is_dynamic(given):
            raise InvalidSettings(f"{DYNAMIC}enabled needs a cluster: set MILLRACE_SPARK_MASTER")
        # A local driver listens on loopback only; remote executors must reach the driver.
        local = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        return {"spark.master": f"local[{cores},{TASK_ATTEMPTS}]", **local}
    found = {
        "spark.master": master,
        "spark.submit.deployMode": "client",
        "spark.task.maxFailures": str(TASK_ATTEMPTS + (settings.cores if settings.spark_environment else 0)),
        "spark.executor.memory": settings.spark_memory,
        # Otherwise the executors that are there when a query starts decide how many tasks its batches have.
        "spark.default.parallelism": cores,
    }
    dynamic = _dynamic(settings.cores, given)
    if master != "yarn" and not master.startswith("k8s://"):
        if settings.spark_environment:
            found["spark.executor.extraJavaOptions"] = _TEMPORARY
        return found | {"spark.cores.max": cores} | dynamic
    if not settings.spark_environment:
        raise InvalidSettings(
            f"executors on {master} have nothing of Millrace: pack an environment (make environment) and name it in"
            " MILLRACE_SPARK_ENVIRONMENT"
        )
    # With dynamic allocation, `instances` would be what a job starts with.
    found |= dynamic or {"spark.executor.instances": cores, "spark.executor.cores": "1"}
    if master == "yarn":
        if not (os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")):
            raise InvalidSettings("for YARN, set HADOOP_CONF_DIR to the folder with the cluster's configuration")
        return found
    if IMAGE not in given:
        raise InvalidSettings(
            f"executors on Kubernetes need an image with Spark: set {IMAGE} in the file that"
            " MILLRACE_SPARK_PROPERTIES names"
        )
    if TEMPLATE not in given:
        path = settings.data_dir / "spark" / "executor.yaml"
        make_folder(path.parent)
        replace_file(path, yaml.safe_dump(executor_pod(given.get(SECRET, ""))))
        found[TEMPLATE] = str(path)
    return found | {"spark.kubernetes.executor.podTemplateContainerName": CONTAINER}


def _is_dynamic(given: Mapping[str, str]) -> bool:
    return given.get(f"{DYNAMIC}enabled", "").lower() == "true"


def _dynamic(cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's properties for executors that come and go, if `given` asks for that: of one core each by default.

    At most `cores` cores, and at least one executor: a new one unpacks the environment before its first task.
    """
    if not _is_dynamic(given):
        return {}
    each = _whole("spark.executor.cores", given, 1)
    if not 0 < each <= cores:
        raise InvalidSettings(f"spark.executor.cores is {each}, and the job has {cores} (MILLRACE_SPARK_CORES)")
    most = _whole(f"{DYNAMIC}maxExecutors", given, cores // each)
    least = _whole(f"{DYNAMIC}minExecutors", given, min(1, most))
    if least > most:
        raise InvalidSettings(f"{DYNAMIC}minExecutors is {least}, more than maxExecutors, {most}")
    return {
        "spark.executor.cores": str(each),
        f"{DYNAMIC}minExecutors": str(least),
        f"{DYNAMIC}maxExecutors": str(most),
        f"{DYNAMIC}shuffleTracking.enabled": "true",  # no service keeps shuffle files beside the executors
        f"{DYNAMIC}shuffleTracking.timeout": _IDLE,
        f"{DYNAMIC}cachedExecutorIdleTimeout": _IDLE,
    }


def _whole(name: str, given: Mapping[str, str], usual: int) -> int:
    text = given.get(name, str(usual))
    if not text.isdecimal():
        raise InvalidSettings(f"{name} is {text[:80]!r}: write a whole number")
    return int(text)


def executor_pod(secret: str) -> dict[str, Any]:
    """Return the template of an executor's pod on Kubernetes: without privileges, with the variables of a Secret."""
    container: dict[str, Any] = {
        "name": CONTAINER,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if secret:
        container["envFrom"] = [{"secretRef": {"name": secret}}]
    context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"automountServiceAccountToken": False, "securityContext": context, "containers": [container]}
    labels = {"app.kubernetes.io/name": "millrace", "app.kubernetes.io/component": "spark-executor"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": labels}, "spec": spec}


def user_properties(settings: Settings) -> dict[str, str]:
    """Return the properties of the file `spark_properties`, in the form of spark-defaults.conf; {} without one.

    Raises InvalidSettings for a file that cannot be read, a property that Millrace sets itself, and a secret: Spark's
    properties are seen in the list of processes.
    """
    if not settings.spark_properties:
        return {}
    path = Path(settings.spark_properties)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"MILLRACE_SPARK_PROPERTIES: {path} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where, match = f"{path}, line {number}", _LINE.fullmatch(line)
        if match is None or not match["key"].startswith("spark."):
            raise InvalidSettings(f"{where}: {line[:80]!r} is not a property of Spark: write spark.NAME VALUE")
        key = match["key"]
        if key in _OWN:
            raise InvalidSettings(f"{where}: Millrace sets {key} itself: remove the line")
        if _SECRET.match(key):
            raise InvalidSettings(
                f"{where}: {key} would be seen in the list of processes: give secrets in the environment, or on"
                f" Kubernetes in a Secret ({SECRET})"
            )
        found[key] = match["value"].strip()
    return found
