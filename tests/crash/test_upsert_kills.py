"""SIGKILL of the log's server and of producers that insert, upsert and commit: each row is there once, whatever died.

No JVM takes part.

The processes and the oracle outside of the system are kill_rig's; a third of the calls that
are no transactions are upserts.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pyarrow.compute as pc
import pytest

from millrace.client.database import connect
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.tables.wal.reader import WalSnapshot
from tests.crash.kill_rig import SCHEMA, check, deployed, wait_for_progress


@pytest.mark.timeout(120)
@pytest.mark.slow  # test_many_callers kills under upserts in `make test`
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_upserts_among_inserts_are_there_once_whoever_is_killed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with deployed(tmp_path) as deployment:
        settings = deployment.settings
        with connect(settings=settings) as client:
            client.catalog.ensure_pchannels(2)
            client.catalog.create_collection("kills", SCHEMA, vchannels=2)
        deployment.start_producer()
        victims = ["log server", "producer"]
        for victim in victims if seed == 1 else chance.choices(victims, k=6):
            wait_for_progress(deployment, deployment.acknowledged())
            time.sleep(chance.uniform(0, 0.3))  # the random moment is what this test is about
            deployment.kill(victim, chance)
        wait_for_progress(deployment, deployment.acknowledged())
        for producer in deployment.producers:
            producer.kill()
        with connect(settings=settings) as client:
            client.catalog.flush("kills")
            ingest_to_end(settings, client.log)
            flush_to_end(settings)
            check(settings, client, deployment.noted(), seed)
            wal = WalSnapshot.open(settings.wal_uri)
            assert wal is not None
            upserts = [rows for name in wal.pchannels() for rows in wal.messages(name, types=["UPSERT"])]
            assert sum(pc.sum(rows["rows"]).as_py() or 0 for rows in upserts) > 0
            assert {kind for rows in upserts for kind in rows["type"].cast("string").to_pylist()} == {"UPSERT"}
