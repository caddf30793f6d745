"""The quality DAGs on a real deployment.

Green and telling its asset, or red and holding removal back until a person says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.operations.quality.gate import blocked
from tests.dags.conftest import RunDag
from tests.tables.wal_maker import Collection, WalMaker

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_failed_law_fails_the_run_and_a_person_releases_it(run_dag: RunDag, settings: Settings) -> None:
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker)
    collection.create()
    for vchannel in collection.vchannels:
        keys: list[object] = [*collection.keys_of(vchannel, 4)]
        rows = {"id": keys, "body": ["body"] * 4}
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
    maker.commit()
    flush_to_end(settings)
    ran = run_dag("quality", {"tables": ["checkpoints"]})
    assert (ran.state, ran.results["check"]["passed"]) == ("success", True)
    DeltaTable(str(Path(settings.checkpoints_uri))).update(updates={"term": "-1"})
    ran = run_dag("quality", {"tables": ["checkpoints"]})
    assert ran.tasks["check"] == "failed"
    (block,) = blocked(settings)
    assert block.expectation == "term-known"


def test_the_release_waits_for_a_person() -> None:
    from tests.dags.conftest import load_dag

    dag = load_dag("quality_release")
    assert dag.get_task("release").upstream_task_ids == {"approve"}
