"""etcd and MariaDB as processes.

Started, killed, started again over their data, and nobody gets in without the password.
"""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pymysql
import pytest
from etcd3gw.client import Etcd3Client

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.etcd import EtcdServer
from millrace.brokers.mariadb import DATABASE, MariaDbServer
from millrace.brokers.programs import PROGRAMS, find_program, install, main


@pytest.mark.slow
def test_an_etcd_that_was_killed_has_what_it_acknowledged(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd", settings=Settings()).start() as server:
        client = Etcd3Client(host="127.0.0.1", port=server.port["client"], api_path="/v3/")
        client.put("a", "1")
        address, pid = server.address, server.pid
        server.kill()
        assert not psutil.pid_exists(pid)
        server.start()
        assert server.address == address
        assert client.get("a") == [b"1"]


def connection(server: MariaDbServer, password: str) -> pymysql.Connection[pymysql.cursors.Cursor]:
    return pymysql.connect(
        host="127.0.0.1",
        port=server.port["client"],
        user=server.credentials.username,
        password=password,
        database=DATABASE,
        autocommit=True,
    )


@pytest.mark.slow
def test_a_mariadb_that_was_killed_has_what_it_committed_and_its_password(tmp_path: Path) -> None:
    with MariaDbServer(tmp_path / "mariadb", settings=Settings()).start() as server:
        secret = server.credentials.password
        with connection(server, secret) as db, db.cursor() as cursor:
            cursor.execute("create table t (id int primary key)")
            cursor.execute("insert into t values (7)")
        for wrong in ("", "x" + secret):
            with pytest.raises(pymysql.err.OperationalError, match="Access denied"):
                connection(server, wrong)
        with pytest.raises(pymysql.err.OperationalError):
            pymysql.connect(host="127.0.0.1", port=server.port["client"], user="root", password="")
        for name in ("password", "users.sql"):
            assert stat.S_IMODE((tmp_path / "mariadb" / name).stat().st_mode) == 0o600
        server.kill()
        server.start()
        assert server.credentials.password == secret
        assert secret not in server.url
        with connection(server, secret) as db, db.cursor() as cursor:
            cursor.execute("select id from t")
            assert cursor.fetchall() == ((7,),)


@pytest.mark.slow
def test_a_mariadb_that_is_made_and_starts_leaves_the_temporary_tables_of_another_one_alone(tmp_path: Path) -> None:
    """At its start it removes what it finds of such tables in its temporary folder, as left by one that was killed."""
    with (
        MariaDbServer(tmp_path / "first", settings=Settings()).start() as first,
        connection(first, first.credentials.password) as db,
        db.cursor() as cursor,
    ):
        cursor.execute("create temporary table held (id int primary key) engine = aria")
        with MariaDbServer(tmp_path / "second", settings=Settings()).start():
            cursor.execute("drop table held")


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def empty_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with an apt-get that notes what it is asked for, and no server."""
    monkeypatch.setattr("millrace.brokers.programs._SYSTEM", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    fake(tmp_path, "env", 'shift; exec "$@"')
    fake(tmp_path, "sudo", 'shift; exec "$@"')
    return tmp_path


def test_what_is_missing_is_installed_and_nothing_else(empty_system: Path) -> None:
    calls = empty_system / "calls"
    fake(
        empty_system,
        "apt-get",
        f'echo "$*" >>"{calls}"; case "$*" in *etcd-server*) echo "#!/bin/sh" >"{empty_system}/etcd";'
        f' /bin/chmod 755 "{empty_system}/etcd";; esac',
    )
    for name in PROGRAMS["mariadb"]:
        fake(empty_system, name, "")
    install(["etcd", "mariadb"])
    update, asked = calls.read_text().splitlines()
    assert update.endswith("update")
    assert asked.endswith("--no-install-recommends --no-upgrade etcd-server")
    install(["etcd", "mariadb"])
    assert len(calls.read_text().splitlines()) == 2


def test_where_nothing_can_be_installed_the_program_says_one_sentence(
    empty_system: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["programs", "mariadb"])
    assert main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "mariadb-server-core mariadb-client-core" in line
    with pytest.raises(InvalidSettings, match="make servers"):
        find_program("etcd", "etcd")


def test_tables_that_cannot_be_made_are_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("in the way")
    with pytest.raises(InvalidSettings, match="system tables cannot be created"):
        MariaDbServer(tmp_path, settings=Settings()).start()


def test_in_the_foreground_it_says_its_url(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millrace.brokers", "etcd", "--data", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("etcd://127.0.0.1:")
        finally:
            server.terminate()
        assert server.wait(30) == 0
