"""What is shipped: the container file's lines done by hand, the chart as it was rendered, the CI file's scripts, the
configuration of the reference.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.base.package import ROOT
from millrace.base.settings import RESERVED, describe
from millrace.brokers.server import free_ports
from millrace.flows.declare.configuration import Configuration
from millrace.runtime.child_processes import ChildProcess
from tools.shipping.quality_gate import problems

HOME = ROOT.parent
SHIPPED = HOME / "tools" / "shipping"
RENDERED = SHIPPED / "rendered"


def _lines() -> list[tuple[str, str]]:
    """Instruction and arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (SHIPPED / "Containerfile").read_text(), flags=re.MULTILINE)
    return [
        (line.split(None, 1)[0], line.split(None, 1)[1])
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def _locked(path: Path) -> dict[str, set[str]]:
    """Versions by name: of some the project's lock has one for each Python."""
    found: dict[str, set[str]] = {}
    for name, pin in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", path.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(pin)
    return found


def test_the_container_file_has_two_stages_by_arguments_and_takes_what_is_there() -> None:
    lines = _lines()
    arguments = dict(value.split("=", 1) for name, value in lines if name == "ARG")
    assert set(arguments) == {"BUILD_IMAGE", "BASE_IMAGE", "SERVICE"}
    assert [value for name, value in lines if name == "FROM"] == ["${BUILD_IMAGE} AS builder", "${BASE_IMAGE} AS prod"]
    for name, value in lines:
        if name == "COPY" and not value.startswith("--from"):
            assert all((HOME / source).exists() for source in value.split()[:-1]), value
    user = [value for name, value in lines if name == "USER"]
    assert user == ["10001:10001"], "not as root"
    (ports,) = [value for name, value in lines if name == "EXPOSE"]
    assert str(Configuration().server.httpPort) in ports.split()


def test_the_variables_of_what_is_shipped_are_settings() -> None:
    files = [
        SHIPPED / "Containerfile",
        *(SHIPPED / "chart").rglob("*.yaml"),
        *(SHIPPED / "values").glob("*"),
        *RENDERED.glob("*.yaml"),
    ]
    named = {name for path in files for name in re.findall(r"\bMILLRACE_[A-Z_]+", path.read_text())}
    assert {"MILLRACE_DATA", "MILLRACE_CACHE", "MILLRACE_LOG_HOST"} <= named
    assert named <= {env for _, env, *_ in describe()} | RESERVED


def test_the_images_hold_what_the_project_was_tested_with() -> None:
    image, all_ = _locked(SHIPPED / "requirements.txt"), _locked(HOME / "requirements.txt")
    assert {name: pins for name, pins in image.items() if not pins <= all_.get(name, set())} == {}
    assert {"pyspark", "apache-airflow"}.isdisjoint(image)
    text = (SHIPPED / "requirements.txt").read_text()
    assert len(re.findall(r"^[a-z0-9._-]+==[^\n]*\\\n +--hash=sha256:", text, re.MULTILINE)) == len(image), (
        "each by its digest"
    )


def test_what_checks_the_chart_is_pinned_by_its_digests() -> None:
    text = (SHIPPED / "validate.txt").read_text()
    pinned = re.findall(r"^([a-z0-9._-]+)==[^\n]*\\\n +--hash=sha256:", text, re.MULTILINE)
    assert "kubernetes-validate" in pinned
    assert len(pinned) == len(re.findall(r"^[a-z0-9._-]+==", text, re.MULTILINE))
    assert "--require-hashes -r $lock" in (SHIPPED / "chart.sh").read_text()


def test_the_configuration_of_the_reference_is_read_as_written() -> None:
    found, default = Configuration.load(SHIPPED / "pipeline-config.yaml"), Configuration()
    assert (found.server, found.kafka, found.log) == (default.server, default.kafka, default.log)
    assert found.brokers()["bootstrap"] == ["kafka-headless.resource.svc.cluster.local.:9097"]
    values = yaml.safe_load((SHIPPED / "chart" / "values.yaml").read_text())["config"]
    del values["existingSecret"]
    assert Configuration.parse(values) == found, "the chart has the same"


def _rendered(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = [each for each in yaml.safe_load_all((RENDERED / f"{name}.yaml").read_text()) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_what_was_rendered_is_of_the_chart_that_is_here() -> None:
    # helm is not on every machine; `make chart` renders, checks by Kubernetes' schemas, and notes what of.
    noted = dict(reversed(line.split()) for line in (RENDERED / "chart.sha256").read_text().splitlines())
    here = {
        str(path.relative_to(SHIPPED)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("chart", "values")
        for path in sorted((SHIPPED / folder).rglob("*"))
        if path.is_file()
    }
    assert noted == here, "run `make chart`"


@pytest.mark.slow
@pytest.mark.timeout(560)  # helm is built where it is not there: minutes of both cores
def test_helm_where_it_is_there_renders_the_same_and_kubernetes_schemas_allow_it() -> None:
    if not (shutil.which("helm") or shutil.which("go")):
        return  # the test above says that what was rendered and checked is of these files
    command = [SHIPPED / "chart.sh", "--check"]
    environment = {**os.environ, "HELM": shutil.which("helm") or ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["default", "full", "cluster"])
def test_the_pods_fit_their_service_their_configuration_and_nobody_s_root(name: str) -> None:
    found = _rendered(name)
    sets = {key[1]: value for key, value in found.items() if key[0] in ("StatefulSet", "Deployment")}
    more = {"default": (), "full": ("worker-flights", "worker-orders")}
    cluster = ("log", "coordinator", "node", "worker-flights")
    assert set(sets) == {"pipes-mgmt", *(f"pipes-{each}" for each in more.get(name, cluster))}
    services = {key[1]: value for key, value in found.items() if key[0] == "Service"}
    for each in services.values():
        selector = each["spec"]["selector"].items()
        chosen = [key for key, one in sets.items() if selector <= one["spec"]["template"]["metadata"]["labels"].items()]
        assert chosen == [each["metadata"]["name"]]
        (container,) = sets[chosen[0]]["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        assert all(ports[port["targetPort"]] == port["port"] for port in each["spec"].get("ports", ()))
    service = services["pipes-mgmt"]
    for each in sets.values():
        pod = each["spec"]["template"]
        assert each["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["automountServiceAccountToken"] is False
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert set(container["resources"]) == {"requests", "limits"}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]} | {"data"}
        assert set(mounts) == volumes
        for before, path in pairwise(container.get("args", ())):
            if before == "--config":
                assert path == f"{mounts['config']}/pipeline-config.yaml"
    assert service["spec"]["ports"][0]["port"] == 13012
    if name != "full":
        kept = found["Secret", "pipes-config"]["stringData"]["pipeline-config.yaml"]
        assert Configuration.parse(yaml.safe_load(kept)) == Configuration.load(SHIPPED / "pipeline-config.yaml")
    else:
        assert not [key for key in found if key[0] == "Secret"], "it is kept elsewhere"


def test_the_pods_go_where_the_values_say() -> None:
    wanted = yaml.safe_load((SHIPPED / "values" / "full.yaml").read_text())
    for (kind, name), each in _rendered("full").items():
        if kind in ("StatefulSet", "Deployment"):
            pod = each["spec"]["template"]
            for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "imagePullSecrets"):
                assert pod["spec"][key] == wanted[key], name
            assert pod["metadata"]["annotations"].items() >= wanted["podAnnotations"].items()
    found = _rendered("cluster")
    for kind, name in (("StatefulSet", "node"), ("Deployment", "coordinator")):
        (spread,) = found[kind, f"pipes-{name}"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
        assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == name


def test_the_network_policies_let_through_what_is_needed() -> None:
    found = _rendered("cluster")
    policies = [value["spec"] for (kind, _), value in found.items() if kind == "NetworkPolicy"]
    labels = {
        name.removeprefix("pipes-"): value["spec"]["template"]["metadata"]["labels"]
        for (kind, name), value in found.items()
        if kind in ("StatefulSet", "Deployment")
    }

    def chosen(selector: dict[str, Any], pod: str) -> bool:
        return selector.get("matchLabels", {}).items() <= labels[pod].items() and all(
            each["operator"] == "In" and labels[pod].get(each["key"]) in each["values"]
            for each in selector.get("matchExpressions", ())
        )

    def rules(pod: str, kind: str) -> list[dict[str, Any]]:
        of = [each for each in policies if kind in each["policyTypes"] and chosen(each["podSelector"], pod)]
        assert of, f"without a policy, everybody reaches {pod}"
        return [rule for each in of for rule in each.get(kind.lower()) or ()]

    for pod, labelled in labels.items():
        anybody = {port["port"] for rule in rules(pod, "Ingress") if "from" not in rule for port in rule["ports"]}
        services = (value["spec"] for (kind, _), value in found.items() if kind == "Service")
        ports = {
            port["port"]
            for each in services
            if each["selector"].items() <= labelled.items()
            for port in each.get("ports", ())
        }
        assert anybody == ports, f"{pod}: from outside, its service and nothing else"
        peers = [peer for rule in rules(pod, "Ingress") for peer in rule.get("from", ())]
        release = [peer for peer in peers if "namespaceSelector" not in peer]
        assert len(release) == (pod in ("node", "coordinator", "log")), "the release's pods give it orders and appends"
        assert all(chosen(peer["podSelector"], other) for peer in release for other in labels)
        assert len(peers) == 2 * len(release), "and clients that the values name"
        blocks = [each["ipBlock"] for rule in rules(pod, "Egress") for each in rule["to"]]
        open_ = [
            ipaddress.ip_network(each["cidr"]) for each in blocks if ipaddress.ip_network(each["cidr"]).prefixlen == 0
        ]
        assert {each.version for each in open_} == {4, 6}
        shut = [ipaddress.ip_network(each) for block in blocks for each in block.get("except", ())]
        for keys in ("169.254.169.254", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254", "fe80::1"):
            address = ipaddress.ip_address(keys)
            assert any(address in each for each in shut if each.version == address.version), keys


def test_the_ci_file_runs_what_there_is() -> None:
    ci = yaml.safe_load((SHIPPED / "azure-pipelines.yaml").read_text())
    assert [stage["stage"] for stage in ci["stages"]] == ["check", "images", "chart"]
    assert "SDP_VERSION" in ci["variables"]
    steps = [step for stage in ci["stages"] for job in stage["jobs"] for step in job["steps"]]
    scripts = [step["script"] for step in steps if "script" in step]
    targets = set(re.findall(r"^([a-z-]+):", (HOME / "Makefile").read_text(), re.MULTILINE))
    asked = {words[1] for words in map(str.split, scripts) if words[0] == "make"}
    assert {"lint", "coverage", "chart"} <= asked <= targets
    for script in scripts:
        for word in shlex.split(script):
            if word.startswith("tools/"):
                assert (HOME / word).exists(), word
    (build,) = (script for script in scripts if "buildx" in script)
    assert "linux/amd64,linux/arm64" in build
    declared = {name.split("=")[0] for kind, name in _lines() if kind == "ARG"}
    assert set(re.findall(r"--build-arg ([A-Z_]+)=", build)) == declared


_MEASURED = 1_795_000_000_000
"""When coverage was measured, in Unix milliseconds; the tests began a minute before."""


def _reports(
    folder: Path,
    *,
    suite: str = 'tests="300" failures="0" errors="0" skipped="0"',
    measured: str = 'lines-valid="100" lines-covered="90"',
    packages: str = '<package name="a" line-rate="0.9"/>',
    at: int | str = _MEASURED,
) -> tuple[Path, Path]:
    """Write the two reports of the quality gate, in the forms of pytest and coverage.py."""
    report, coverage = folder / "tests.xml", folder / "coverage.xml"
    begun = datetime.fromtimestamp(_MEASURED / 1000 - 60, UTC).isoformat()
    report.write_text(f'<testsuites><testsuite {suite} timestamp="{begun}"/></testsuites>')
    coverage.write_text(f'<coverage {measured} timestamp="{at}">{packages}</coverage>')
    return report, coverage


@pytest.mark.parametrize(
    ("suite", "sonar", "words"),
    [
        ('tests="300" failures="0" errors="0" skipped="0"', "OK", []),
        ('tests="300" failures="0" errors="0" skipped="0"', "$(SONARQUBE_QUALITY_GATE)", []),
        ('tests="300" failures="2" errors="0" skipped="1"', "", ["2 failures", "1 skipped"]),
        ('tests="3" failures="0" errors="0" skipped="0"', "ERROR",
            ["3 tests ran, expected at least 140", "SonarQube's gate is ERROR"]),
    ],
)  # fmt: skip
def test_the_quality_gate_says_what_is_wrong(tmp_path: Path, suite: str, sonar: str, words: list[str]) -> None:
    assert problems(*_reports(tmp_path, suite=suite), sonar) == words


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ('lines-valid="0"', ["no line was measured"]),
        ('lines-valid="80" lines-covered="80" branches-valid="20" branches-covered="4"',
            ["84.0% of lines and branches ran, expected at least 85%"]),
    ],
)  # fmt: skip
def test_the_quality_gate_fails_below_its_coverage(tmp_path: Path, measured: str, words: list[str]) -> None:
    packages = '<package name="store" line-rate="0.59"/><package name="api" line-rate="0.6"/>'
    report, coverage = _reports(tmp_path, measured=measured, packages=packages)
    low = [] if "no line" in words[0] else ["store: 59.0% of its lines ran, expected at least 60%"]
    assert problems(report, coverage, "") == [*words, *low]
    gate = [sys.executable, str(SHIPPED / "quality_gate.py"), str(report), str(coverage)]
    done = subprocess.run(gate, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (1, [*words, *low])


@pytest.mark.parametrize("missing", ["tests.xml", "coverage.xml"])
@pytest.mark.parametrize("content", [None, "", "<coverage lines-valid"])
def test_the_quality_gate_fails_without_its_reports(tmp_path: Path, missing: str, content: str | None) -> None:
    report, coverage = _reports(tmp_path)
    assert problems(report, coverage, "") == []
    (tmp_path / missing).unlink()
    if content is not None:
        (tmp_path / missing).write_text(content)
    [said] = problems(report, coverage, "")
    assert "cannot be read, so nothing was checked" in said


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (_MEASURED - 61_000, ["the coverage was measured before the tests began: it is an earlier run's"]),
        ("", ["a report does not say when it was made"]),
    ],
)
def test_the_quality_gate_fails_with_the_coverage_of_an_earlier_run(
    tmp_path: Path, at: int | str, words: list[str]
) -> None:
    assert problems(*_reports(tmp_path, at=at), "") == words


@pytest.mark.parametrize("service", ["", "pipeline-other"])
def test_an_image_of_no_service_says_so(service: str) -> None:
    done = subprocess.run(
        [SHIPPED / "start"],
        env={**os.environ, "SERVICE": service},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, "log-server, coordinator or node" in done.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_what_the_lines_of_the_container_file_make_serves(tmp_path: Path) -> None:
    home, code = tmp_path / "millrace", tmp_path / "src"
    # The builder's lines, with a folder in place of its root.
    for name, value in _lines():
        if name == "FROM" and "prod" in value:
            break
        if name == "COPY":
            *sources, target = value.split()
            for source in sources:
                place = code / target if target != "./" else code / source
                place.parent.mkdir(parents=True, exist_ok=True)
                if (HOME / source).is_dir():
                    shutil.copytree(HOME / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
                else:
                    shutil.copy(HOME / source, place)
        elif name == "RUN":
            code.mkdir(exist_ok=True)
            script = value.replace("/opt/millrace", str(home)).replace("python -m venv", f"{sys.executable} -m venv")
            done = subprocess.run(
                ["sh", "-c", script], cwd=code, capture_output=True, text=True, timeout=450, check=False
            )
            assert done.returncode == 0, done.stderr[-3000:]
    # And what an image of each service starts.
    (port,) = free_ports(1)
    (tmp_path / "config.yaml").write_text(f"server: {{httpPort: {port}}}\n")
    environment = {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "MILLRACE_DATA": str(tmp_path / "data"),
        "MILLRACE_CACHE": str(tmp_path / "cache"),
        "MILLRACE_SERVER_TOKEN": "the-machines-own-token",
        "MILLRACE_LOG_HOST": "0.0.0.0",  # as the chart says
        "PYTHONPATH": "",
    }
    (tmp_path / "data").mkdir(mode=0o700)
    command = ["sh", str(SHIPPED / "start"), "--config", str(tmp_path / "config.yaml")]
    job = ChildProcess(command, log_file=tmp_path / "mgmt.log", env={**environment, "SERVICE": "pipeline-mgmt"})
    try:
        health = _health(job, port)
        assert (health["service"], health["dependencies"]["store"]) == ("millrace-pipelines", "ok")
    finally:
        assert job.stop(deadline=60) == 0, job.tail()
    programs = "millrace.log.server.main, millrace.node.cluster.append_router, millrace.node.cluster.__main__"
    imported = f"import {programs}, millrace.service.__main__, confluent_kafka, obstore, deltalake, pymysql"
    subprocess.run([home / "bin" / "python", "-c", imported], env=environment, timeout=60, check=True)
    wrong = tmp_path / "pipeline.yaml"
    wrong.write_text("id: flights\nsink: {kind: nowhere}\n")
    done = subprocess.run(
        ["sh", SHIPPED / "start", wrong], env={**environment, "SERVICE": "pipeline-worker"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "source" in done.stderr) == (1, True), done.stderr


def _health(job: ChildProcess, port: int) -> dict[str, Any]:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/v1/pipelines-health", headers={"Authorization": "Bearer the-machines-own-token"}
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            assert job.running(), job.tail()
            assert time.monotonic() < deadline, job.tail()
            time.sleep(0.2)
