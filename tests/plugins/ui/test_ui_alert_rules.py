"""The alert rules ask for what is exposed, each has a case in which it fires, and Prometheus itself agrees when."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from millrace.base.metrics import NAMESPACE
from tests.plugins.ui.test_ui_dashboard import SERIES

RULES = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "alerts.yml"
CASES = Path(__file__).with_name("alert_rules_test.yml")
_RULES = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", _RULES, ids=[rule["alert"] for rule in _RULES])
def test_a_rule_asks_for_what_is_exposed_says_what_to_do_and_has_a_case(rule: dict[str, object]) -> None:
    expression = str(rule["expr"])
    names = re.findall(rf"\b{NAMESPACE}_\w+", expression)
    assert names
    assert not [name for name in names if name not in SERIES]
    assert {"summary", "action"} <= dict(rule["annotations"]).keys()  # type: ignore[call-overload]
    assert f'alertname="{rule["alert"]}"' in CASES.read_text()


def _promtool(folder: Path) -> str:
    """Prometheus' checker: from PATH, or out of Debian's package, unpacked into `folder`."""
    found = shutil.which("promtool")
    if found is None and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if os.geteuid() == 0:
            subprocess.run(["apt-get", "-q", "update"], env=quiet, timeout=300, check=False)
        subprocess.run(["apt-get", "-q", "download", "prometheus"], cwd=folder, env=quiet, timeout=300, check=False)
        for package in folder.glob("prometheus*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")], timeout=60, check=True)
        found = shutil.which("promtool", path=str(folder / "unpacked" / "usr" / "bin"))
    assert found, "no promtool: install Prometheus (Debian: apt-get install prometheus)"
    return found


@pytest.mark.slow
def test_prometheus_takes_the_rules_and_fires_each_when_it_should(tmp_path: Path) -> None:
    for path in (RULES, CASES):
        shutil.copy(path, tmp_path)
    tool = _promtool(tmp_path)
    for arguments in (["check", "rules", RULES.name], ["test", "rules", CASES.name]):
        done = subprocess.run([tool, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
