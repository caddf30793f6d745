"""``log switch``: the whole system goes on over the switch, online and with nothing running."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.deployment import Deployment


@pytest.mark.slow
def test_rows_from_before_and_after_a_switch_are_one_collection_and_verify(
    deployment: Deployment, tmp_path: Path
) -> None:
    to = f"rocksmq://{tmp_path}/second"
    deployment.create_users()
    deployment.produce({"id": 1, "name": "Ada"})
    looked = deployment.as_json("log", "switch", "--to", to, "--dry-run")
    assert [row["new_begin"] for row in looked] == [None, None]
    passed = deployment.as_json("log", "switch", "--to", to)
    assert [row["pchannel"] for row in passed] == ["dml_0", "dml_1"]
    assert {row["new_begin"] for row in passed} == {f"{1 << 48}:0"}
    assert deployment.as_json("log", "switch", "--to", to) == []
    deployment.produce({"id": 2, "name": "Grace"})
    deployment.catch_up()
    assert sorted(row["id"] for row in deployment.lines("read", "users", "--format", "jsonl")) == [1, 2]
    assert {row["begin"] for row in deployment.as_json("log", "describe")} == {"0:0"}
    assert "does not hold" not in deployment.ok("verify")
    assert [row["type"] for row in deployment.lines("log", "read", "dml_0")].count("ALTER_WAL") == 1


@pytest.mark.slow
def test_offline_needs_that_nothing_runs_and_starts_nothing(deployment: Deployment, tmp_path: Path) -> None:
    to = f"rocksmq://{tmp_path}/second"
    deployment.create_users()
    deployment.produce({"id": 1, "name": "Ada"})
    deployment.fails("LOG_BUSY", "log", "switch", "--to", to, "--offline")
    deployment.ok("log", "stop")
    assert len(deployment.as_json("log", "switch", "--to", to, "--offline")) == 2
    assert "No log server runs" in deployment.ok("log", "stop")
    deployment.produce({"id": 2, "name": "Grace"})
    deployment.catch_up(flush=False)
    assert sorted(row["id"] for row in deployment.lines("read", "users", "--format", "jsonl")) == [1, 2]


def test_an_unknown_backend_is_refused_in_one_line(deployment: Deployment) -> None:
    deployment.create_users()
    deployment.fails("INVALID_SETTINGS", "log", "switch", "--to", "nonsense://x")
