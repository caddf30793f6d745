"""How a deployment's settings start the log's server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.rpc.launch import launch_of


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 300.0),
        ({"log_idle_seconds": 20.0}, 20.0),
        ({"log_idle_seconds": 0.0}, None),
        ({"log_port": 7700}, None),
        ({"log_host": "0.0.0.0"}, None),
    ],
    ids=str,
)
def test_a_server_ends_when_idle_unless_clients_elsewhere_know_its_address(
    tmp_path: Path, given: dict[str, Any], seconds: float | None
) -> None:
    assert launch_of(Settings(data_dir=tmp_path, **given)).idle_timeout == seconds


def test_the_server_looks_for_the_tables_where_the_deployment_has_them(tmp_path: Path) -> None:
    given = dict(launch_of(Settings(data_dir=tmp_path, tables="s3://box/t")).environment)
    assert given["MILLRACE_TABLES"] == "s3://box/t"
    assert dict(launch_of(Settings(data_dir=tmp_path)).environment)["MILLRACE_TABLES"] == "", (
        "not the caller's variable"
    )
