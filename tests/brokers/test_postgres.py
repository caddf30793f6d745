"""PostgreSQL as a process, also where root starts it in a folder that is root's alone."""

from __future__ import annotations

from pathlib import Path

import psutil
import psycopg
import pytest

from millrace.base.settings import Settings
from millrace.brokers.postgres import PostgresServer


def test_a_postgres_that_was_killed_has_what_it_committed_and_its_password(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    with PostgresServer(tmp_path / "closed" / "postgres", settings=Settings()).start() as server:
        user, secret = server.credentials
        login = {"host": "127.0.0.1", "port": server.port["client"], "dbname": "postgres"}
        with psycopg.connect(**login, user=user, password=secret) as db:
            db.execute("create table t (id int primary key)")
            db.execute("insert into t values (7)")
        with pytest.raises(psycopg.OperationalError, match="authentication failed"):
            psycopg.connect(**login, user=user, password="x" + secret)
        assert secret not in " ".join(psutil.Process(server.pid).cmdline())
        pid = server.pid
        server.kill()
        assert not psutil.pid_exists(pid)
        server.start()
        with psycopg.connect(**login, user=user, password=secret) as db:
            assert db.execute("select id, current_setting('wal_level') from t").fetchall() == [(7, "logical")]
