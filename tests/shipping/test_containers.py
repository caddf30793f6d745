"""The chart's containers, each started as a process: its rendered command, environment, volumes, user and probes.

A pod is a network namespace with an address of its own. Its root is read-only, and it runs as the chart's user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.mariadb import MariaDbServer
from millrace.brokers.versitygw import VersityGateway
from millrace.client.database import connect
from millrace.flows.declare.keys import new_key
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.runtime.child_processes import ChildProcess
from tests.certificates import certificate
from tests.conftest import RUN_MARK
from tests.network_namespaces import Machine, machines, require_namespaces
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SHIPPED = ROOT.parent / "tools" / "shipping"
TOKEN = "a-token-that-all-pods-have"
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("word", "string", True)), "id")
PIPELINE = """
name: flights
source: {{kind: kafka, bootstrap: ["{kafka}"], topics: [words]}}
sink: {{kind: collection, collection: words}}
errors: {{collection: letters}}
"""


@dataclass
class Pod:
    """One container of the chart, in a namespace."""

    machine: Machine
    container: dict[str, Any]
    user: dict[str, Any]
    home: Path
    """Its volumes: a folder each."""
    name: str
    given: dict[str, str]
    """Variables from Secrets, and values of the chart that a test replaces."""
    job: ChildProcess = field(init=False)

    def start(self) -> None:
        volumes = {}
        for mount in self.container["volumeMounts"]:
            folder = self.home / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            volumes[mount["mountPath"]] = str(folder)
            if not mount.get("readOnly"):
                os.chown(folder, self.user["runAsUser"], self.user["runAsGroup"])
                folder.chmod(0o700)
        variables = self._variables(volumes)
        arguments = [_mounted(self._expanded(each, variables), volumes) for each in self.container.get("args", [])]
        user, group = (str(self.user[name]) for name in ("runAsUser", "runAsGroup"))
        command = [
            *self.machine.within(self.home, hidden=[]),
            *("sh", "-c", " && ".join([*_readable(), *self._read_only(), 'exec "$@"']), "sh"),
            *(
                "setpriv",
                f"--reuid={user}",
                f"--regid={group}",
                "--clear-groups",
                "--no-new-privs",
                "--bounding-set=-all",
            ),
            *("env", "-i", *(f"{name}={value}" for name, value in variables.items())),
            *("sh", str(SHIPPED / "start"), *arguments),
        ]
        self.job = ChildProcess(command, log_file=self.home.with_suffix(".log"), env={})

    def _variables(self, volumes: dict[str, str]) -> dict[str, str]:
        facts = {"status.podIP": self.machine.host, "metadata.name": self.name}
        found = {
            "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MILLRACE_DATA": volumes["/var/lib/millrace"],
            "MILLRACE_CACHE": f"{volumes['/var/lib/millrace']}/cache",
            "TMPDIR": volumes["/tmp"],
            "HOME": volumes["/var/lib/millrace"],
            RUN_MARK: os.environ[RUN_MARK],
        }
        if not any(each["name"] == "SERVICE" for each in self.container.get("env") or []):
            found["SERVICE"] = self.container["name"]  # of an image of its own
        for each in self.container.get("env") or []:
            value = facts[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
            found[each["name"]] = _mounted(value, volumes)
        return found | self.given

    @staticmethod
    def _expanded(text: str, variables: dict[str, str]) -> str:
        return re.sub(r"\$\(([A-Z_]+)\)", lambda found: variables[found[1]], text)

    def _read_only(self) -> list[str]:
        assert self.container["securityContext"]["readOnlyRootFilesystem"]
        return [f"mount --bind {self.home} {self.home}", "mount -o remount,bind,ro /"]

    def ready(self, probe: dict[str, Any]) -> bool:
        ports = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        try:
            if "tcpSocket" in probe:
                socket.create_connection((self.machine.host, ports[probe["tcpSocket"]["port"]]), timeout=1.0).close()
                return True
            asked = probe["httpGet"]
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # as the kubelet does
            url = f"{asked.get('scheme', 'HTTP').lower()}://{self.machine.host}:{ports[asked['port']]}{asked['path']}"
            with urllib.request.urlopen(url, timeout=5.0, context=trusting) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_ready(self) -> None:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if kind in self.container:
                until(lambda kind=kind: self._living() and self.ready(self.container[kind]), kind, seconds=90)

    def _living(self) -> bool:
        assert self.job.running(), self.job.tail(40)
        return True

    def stop(self) -> int:
        """Stop the container, and what it left in the pod; return its exit code."""
        try:
            return self.job.stop(deadline=60)
        finally:
            self.machine.kill_all()


def _mounted(text: str, volumes: dict[str, str]) -> str:
    for path, folder in volumes.items():
        if text == path or text.startswith(f"{path}/"):
            return folder + text.removeprefix(path)
    return text


def _readable() -> list[str]:
    """Return commands that show Python and this checkout in a folder that only root may enter."""
    script = []
    for number, path in enumerate(dict.fromkeys([Path(sys.base_prefix), ROOT.parent, Path(sys.prefix).resolve()])):
        closed = [each for each in path.parents if each != Path("/") and not each.stat().st_mode & 0o001]
        if closed:
            kept, top = f"/mnt/{number}", closed[-1]
            script += [
                "mountpoint -q /mnt || mount -t tmpfs -o mode=755 none /mnt",
                f"mkdir {kept}",
                f"mount --bind {path} {kept}",
                f"(mountpoint -q {top} || mount -t tmpfs -o mode=755 none {top})",
                f"mkdir -p {path}",
                f"mount --bind {kept} {path}",
            ]
    return script


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that other users may enter, as those of pytest are not."""
    made = Path(tempfile.mkdtemp(prefix="millrace-pods-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def pods(stack: ExitStack, home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Pod], KafkaBroker, Path]:
    """Start the servers that the pods share, and return the pods of the chart's cluster, not started."""
    settings = Settings(data_dir=home / "servers" / "data")
    settings.data_dir.mkdir(parents=True, mode=0o700)
    away = stack.enter_context(machines(6))
    store = stack.enter_context(VersityGateway(home / "servers" / "s3", settings=settings, host=away[0].home))
    kafka = stack.enter_context(KafkaBroker(home / "servers" / "kafka", settings=settings, host=away[0].home))
    database = stack.enter_context(MariaDbServer(home / "servers" / "mariadb", settings=settings, host=away[0].home))
    given = {
        "MILLRACE_TABLES": f"{store.url}/{home.name}",
        "MILLRACE_LOG": kafka.url,
        "MILLRACE_META_STORE": database.url,
        "MILLRACE_SERVER_TOKEN": TOKEN,
        "MILLRACE_PIPELINE_KEYS": new_key(),
        "MILLRACE_PCHANNELS": "4",
        "MILLRACE_SESSION_SECONDS": "4",
        "MILLRACE_FLUSH_INTERVAL": "1",
        **store.client_environment,
        **database.client_environment,
    }
    secrets = home / "secrets"
    secrets.mkdir()
    cert, key = certificate(secrets, "millrace")
    rendered = list(yaml.safe_load_all((SHIPPED / "rendered" / "cluster.yaml").read_text()))
    specs = {
        each["metadata"]["name"].removeprefix("pipes-"): each["spec"]["template"]["spec"]
        for each in rendered
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    assert set(specs) == {"log", "coordinator", "node", "mgmt", "worker-flights"}
    names = [*((name, name) for name in specs), ("node", "node-1")]
    made = {}
    for machine, (spec, name) in zip(away, names, strict=True):
        (container,) = specs[spec]["containers"]
        pod = Pod(machine, container, specs[spec]["securityContext"], home / name, name, given)
        for mount in container["volumeMounts"]:
            volume = pod.home / mount["name"]
            volume.mkdir(parents=True)
            if mount["name"] == "tls":
                shutil.copy(cert, volume / "tls.crt")
                shutil.copy(key, volume / "tls.key")
            elif mount["name"] == "config":
                shutil.copy(SHIPPED / "pipeline-config.yaml", volume / "pipeline-config.yaml")
            elif mount["name"] == "pipeline":
                (volume / "pipeline.yaml").write_text(PIPELINE.format(kafka=kafka.address))
            for each in volume.iterdir():
                os.chown(each, -1, pod.user["fsGroup"])
                each.chmod(0o440)
        made[name] = pod
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return made, kafka, cert


def test_the_containers_make_a_cluster_that_outlives_each_of_its_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    require_namespaces()
    with folder() as home, ExitStack() as stack:
        all_, kafka, roots = pods(stack, home, monkeypatch)
        admin = AdminClient({"bootstrap.servers": kafka.address})
        admin.create_topics([NewTopic("words", 2)])["words"].result(30)
        for pod in all_.values():
            pod.start()
            stack.callback(pod.stop)
        for pod in all_.values():
            pod.wait_ready()
        address = f"grpc+tls://{all_['log'].machine.host}:7700"
        with connect(address, roots=roots, tls_name="millrace", token=TOKEN) as client:
            client.catalog.ensure_pchannels(4)
            client.catalog.create_collection("words", SCHEMA, vchannels=4)
            client.collection("words").insert(pa.table({"id": list(range(1000)), "word": ["x"] * 1000}))
            producer = Producer({"bootstrap.servers": kafka.address})
            for number in range(1000, 2000):
                producer.produce("words", json.dumps({"id": number, "word": "y"}).encode())
            assert producer.flush(30) == 0

            def whole(count: int) -> bool:
                """Whether the rows up to `count` are there, each once."""
                found = client.collection("words").read(columns=["id"])["id"].to_pylist()
                assert len(found) == len(set(found)) <= count
                return len(found) == count

            until(lambda: whole(2000), f"the flow's rows\n{all_['worker-flights'].job.tail(30)}", seconds=90)
            for name in ("node", "coordinator", "log"):
                pod = all_[name]
                assert pod.stop() == 0, pod.job.tail(30)
                shutil.rmtree(pod.home / "data")  # its volume ends with it
                pod.start()
                pod.wait_ready()
            client.collection("words").insert(pa.table({"id": list(range(2000, 2500)), "word": ["z"] * 500}))
            assert whole(2500)
            for name in ("worker-flights", "mgmt"):
                pod = all_[name]
                pod.stop()
                shutil.rmtree(pod.home / "data")
                pod.start()
            for number in range(2500, 3000):
                producer.produce("words", json.dumps({"id": number, "word": "w"}).encode())
            assert producer.flush(30) == 0
            until(lambda: whole(3000), f"it goes on\n{all_['worker-flights'].job.tail(30)}", seconds=90)
            all_["mgmt"].wait_ready()
