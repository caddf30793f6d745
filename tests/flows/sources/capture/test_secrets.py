"""No process list, no file and no other process's environment has the password of a capture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import millrace.testing
from millrace.flows.sources.capture import engine
from millrace.flows.sources.capture.engine import Engine
from tests.flows.sources.sql.databases import Base
from tests.waiting import until

VARIABLE = "SHOP_PASSWORD"


def places(secret: str, process: psutil.Process, folder: Path) -> Iterator[str]:
    """Where the secret is to be found, of a process with those below it, and of the files of a folder."""
    for each in [process, *process.children(recursive=True)]:
        if secret.encode() in Path(f"/proc/{each.pid}/cmdline").read_bytes():
            yield f"command line of {each.name()}"
        variables = Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0")
        assert Path(f"/proc/{each.pid}/environ").stat().st_mode & 0o077 == 0, "other users cannot read it"
        if any(secret.encode() in one for one in variables if not one.startswith(f"{VARIABLE}=".encode())):
            yield f"environment of {each.name()}"
        if b"java" in Path(f"/proc/{each.pid}/cmdline").read_bytes() and any(
            secret.encode() in one for one in variables
        ):
            yield f"environment of the engine {each.name()}"
    for path in folder.rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            yield str(path)


def test_an_engine_gets_nothing_of_the_worker_s_environment_that_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java, told = tmp_path / "bin" / "java", tmp_path / "environment"
    java.parent.mkdir()
    java.write_text(f'#!/bin/sh\nenv > {told}.new; echo "$@" >> {told}.new; mv {told}.new {told}; cat > /dev/null\n')
    java.chmod(0o755)
    monkeypatch.setenv(VARIABLE, "hidden-17")
    monkeypatch.setattr(engine, "find_java", lambda: tmp_path)
    monkeypatch.setattr(engine, "debezium_jars", lambda settings: [])
    settings = millrace.Settings(data_dir=tmp_path / "data")
    with Engine(settings, {"database.password": "hidden-17"}, log_file=tmp_path / "engine.log"):
        until(told.exists, "it runs", seconds=20)
    said = told.read_text()
    assert "PATH=" in said
    assert "hidden-17" not in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["query", "mariadb", "postgres"])
def test_nothing_of_a_running_capture_shows_its_password(tmp_path: Path, kind: str) -> None:
    """Supervisor, worker and engine run; rows arrive, and one of them is a letter."""
    name = "postgres" if kind == "postgres" else "mariadb"
    base = Base(tmp_path, name)
    base.execute("create table items (id int primary key, v int)", "insert into items values (1, 1), (2, null)")
    if kind == "postgres":
        base.execute("alter table items replica identity full")
    source = {**base.place, "kind": kind, "table": "items", "password": f"${{env:{VARIABLE}}}"}
    if kind == "query":
        source |= {"column": "id", "every_seconds": 0.1}
    else:
        del source["engine"]
    flow = {
        "id": "secret", "source": source, "sink": {"kind": "collection", "collection": "rows"},
        "errors": {"collection": "letters"},
    }  # fmt: skip
    file = tmp_path / "flow.json"
    file.write_text(json.dumps(flow))
    data = base.settings.data_dir
    with millrace.testing.deployment(data) as db:
        db.create_collection("rows", {"id": "int64", "v": "int64"}, key="id")
        env = os.environ | {VARIABLE: base.password, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "millrace", "flows", "run", str(file), "--data", str(data)]
        with (
            (tmp_path / "output").open("wb") as output,
            subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True) as running,
        ):
            try:
                until(lambda: db["rows"].count() == 1, "a row arrived", seconds=150)
                until(lambda: "letters" in db and db["letters"].count() == 1, "a letter arrived", seconds=60)
                db["rows"].flush()
                found = list(places(base.password, psutil.Process(running.pid), tmp_path))
            finally:
                running.send_signal(signal.SIGTERM)
                running.wait(60)
        assert found == []
        assert list(places(base.password, psutil.Process(), tmp_path)) == [], "nor after its end"
