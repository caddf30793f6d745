"""A capture that moves between machines, each of which is killed or cut off and loses its folder: each change once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.flows.sinks.delta.sink import OUTPUTS
from millrace.runtime.child_processes import ChildProcess
from millrace.storage.table import open_table
from tests import s3_server
from tests.flows.brokers_in_process import Brokers, brokers
from tests.flows.sources.mariadb.test_table import Shop
from tests.waiting import until


@pytest.fixture
def kafka() -> Iterator[Brokers]:
    with brokers() as found:
        found.send("p.errors", [])
        found.producer.list_topics("p.errors", timeout=20)  # which makes it
        yield found


def documents(settings: Settings) -> dict[int, dict[str, Any]]:
    """The changes in the table, by number. Each is there once."""
    table = open_table(settings.table_uri(f"{OUTPUTS}/out"))
    if table is None:
        return {}
    rows = [row for each in table.actions().to_pylist() for row in table.read(each["path"]).to_pylist()]
    assert set(Counter(row["offset"] for row in rows).values()) <= {1}
    return {row["offset"]: json.loads(row["document"]) for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_machine_is_lost_and_the_next_one_goes_on(
    kafka: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, dice, stop = Shop(tmp_path, "id int primary key, amount bigint"), random.Random(5), threading.Event()
    shop.execute("insert into items select seq, 0 from seq_1_to_200")
    source = {"kind": "mariadb", **shop.login, "password": shop.password, "database": shop.database, "table": "items"}
    declared = {
        "id": "p",
        "source": source,
        "sink": {"kind": "delta", "table": "out"},
        "errors": {"create": False, "cluster": {"bootstrap": [kafka.address]}},
    }
    file = tmp_path / "flow.json"
    file.write_text(json.dumps(declared))

    def write() -> None:
        while not stop.wait(0.05):
            keys = ", ".join(str(dice.randrange(1, 201)) for _ in range(dice.randrange(1, 40)))
            shop.execute(f"update items set amount = amount + 1 where id in ({keys})")

    def through(settings: Settings) -> bool:
        """Each row came as zero and then one higher at each change, up to what the database has."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for _, each in sorted(documents(settings).items()):
            found[each["id"]].append(each["amount"])
        assert all(amounts == list(range(len(amounts))) for amounts in found.values()), found
        return {key: amounts[-1] for key, amounts in found.items()} == {
            row["id"]: row["amount"] for row in shop.rows().values()
        }

    with s3_server.bucket(monkeypatch) as uri:
        first = Settings(
            data_dir=tmp_path / "m0",
            tables=f"{uri}/tables",
            meta_store=f"sqlite:///{tmp_path}/meta.db",
            session_seconds=3.0,
        )
        machines = [replace(first, data_dir=tmp_path / f"m{number}") for number in range(4)]
        jobs: list[ChildProcess] = []

        def begin(settings: Settings) -> ChildProcess:
            command = [sys.executable, "-m", "millrace.flows.range_host", str(file)]
            log = tmp_path / f"{settings.data_dir.name}.log"
            jobs.append(ChildProcess(command, log_file=log, env={**os.environ, **settings.environment()}))
            return jobs[-1]

        writer = threading.Thread(target=write)
        try:
            job = begin(first)
            until(lambda: len(documents(first)) >= 200, f"the snapshot is in: {job.tail()}", seconds=120)
            writer.start()
            for number, settings in enumerate(machines[1:], 1):
                seen = len(documents(first))
                until(lambda s=seen: len(documents(first)) > s + 50, f"it goes on: {jobs[-1].tail()}", seconds=120)
                if number == 2:
                    os.kill(job.pid, signal.SIGSTOP)
                else:
                    job.kill()
                    shutil.rmtree(machines[number - 1].data_dir)
                former, job = job, begin(settings)
                if number == 2:
                    seen = len(documents(first))
                    until(lambda s=seen: len(documents(first)) > s, f"the next goes on: {job.tail()}", seconds=120)
                    os.kill(former.pid, signal.SIGCONT)
                    until(lambda f=former: not f.running(), f"the former one ends: {former.tail()}", seconds=120)
                    assert "taken over the capture" in former.tail()
            stop.set()
            writer.join(30)
            until(lambda: through(first), f"the table has what the database has: {job.tail()}", seconds=120)
        finally:
            stop.set()
            if writer.is_alive():
                writer.join(30)
            for each in jobs:
                if each.running():
                    os.kill(each.pid, signal.SIGCONT)
                each.kill()
