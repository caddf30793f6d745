"""Three nodes on an object store in trouble: they die, sleep and return at seeded moments, and each row is there once.

A proxy between the processes and the store answers some requests with 503, breaks some off, and loses some answers
after the store did what was asked.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from pathlib import Path

import pytest

from millrace.base.deadline import Deadline, poll_until
from millrace.base.failpoint import VARIABLE
from millrace.demo.cluster import LocalCluster
from tests import running_brokers
from tests.crash.test_cluster_moves import WAIT, check, goes_on, on_kafka, streaming, until, wait_flushed
from tests.s3_server import Faults, bucket

NODES = ("n1", "n2", "n3")
PLACES = ("commit.checked", "commit.done", "flush.written", "flush.rows")


def sleep_beyond_the_session(cluster: LocalCluster, name: str) -> None:
    session = cluster.session(name)
    cluster.suspend(name)
    until(lambda: cluster.session(name) != session, cluster)
    cluster.resume(name)
    until(lambda: cluster.session(name) not in ("", session), cluster)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_nodes_die_at_any_moment_and_every_row_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen, drawn, guard = random.Random(seed), random.Random(seed), threading.Lock()

    def broken(method: str, path: str) -> str:
        with guard:
            return drawn.choice([""] * 57 + ["503", "reset", "lost"])

    with Faults() as faults, bucket(monkeypatch, faults.at) as tables:
        meta = f"{running_brokers.etcd().url}/{uuid.uuid4().hex}"
        with streaming(tmp_path, 4, log=on_kafka(), meta_store=meta, tables=f"{tables}/millrace") as (
            settings,
            client,
            collection,
            cluster,
            stream,
        ):
            faults.break_request = broken
            cluster.coordinator()
            for name in NODES:
                cluster.node(name)
            cluster.wait_owned(set(NODES), pchannels=4, deadline=WAIT)
            for _ in range(6):
                name, deed = chosen.choice(NODES), chosen.choice(("kill", "place", "sleep"))
                time.sleep(chosen.uniform(0.2, 2.0))  # the moment of the seed
                if deed == "sleep":
                    sleep_beyond_the_session(cluster, name)
                else:
                    cluster.jobs.pop(name).kill()
                    if deed == "place":
                        place = f"{chosen.choice(PLACES)}@{chosen.randint(2, 5)}"
                        marked = cluster.node(name, environment={VARIABLE: place})
                        poll_until(lambda: not marked.running(), Deadline.after(20.0), interval=0.05)  # noqa: B023
                        marked.kill()  # it may have nothing to do there
                        cluster.jobs.pop(name)
                    cluster.node(name)
                goes_on(stream, cluster)
            cluster.wait_owned(set(NODES), pchannels=4, deadline=WAIT)
            stream.stop()
            wait_flushed(settings, client, cluster)
            assert set(cluster.stop().values()) == {0}, cluster.log_tails()
            assert stream.failures == []
            faults.break_request = lambda method, path: ""
            check(settings, client, collection, stream.count)
