"""The saga's steps over topics: what was there before a pipeline is not its own to take away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.flows.range_host import topic_admin
from millrace.pipelines.declaration import as_pipeline, pipeline_of
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.runner import run
from millrace.pipelines.deploy.saga import Saga
from millrace.pipelines.deploy.world import RealWorld
from millrace.pipelines.store.records import Phase
from millrace.pipelines.store.store import open_pipelines

DECLARED = {
    "id": "flights",
    "source": {"kind": "kafka", "bootstrap": ["127.0.0.1:9"], "topics": ["in", "more"]},
    "sink": {"kind": "delta", "table": "flights"},
}


class Broken(RealWorld):
    """Its last step cannot be made."""

    def make(self, step: str, record: Any, things: tuple[str, ...]) -> None:
        if step == "deployment":
            raise LogUnavailable("no answer")
        super().make(step, record, things)


@pytest.mark.parametrize("fails", [True, False], ids=["a create that fails", "a delete"])
def test_topics_that_were_there_before_stay(settings: Settings, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    topics = {"in", "somebody-else-s"}

    def make(cluster: Any, names: Iterable[str], *, settings: Mapping[str, str] | None = None) -> None:
        topics.update(names)

    def delete(cluster: Any, names: Iterable[str]) -> None:
        topics.difference_update(names)

    monkeypatch.setattr(topic_admin, "look", lambda cluster, **_: topic_admin.Found("c", frozenset(topics)))
    monkeypatch.setattr(topic_admin, "make", make)
    monkeypatch.setattr(topic_admin, "delete", delete)
    settings.data_dir.mkdir(mode=0o700)
    pipeline = pipeline_of(DECLARED)
    world = (Broken if fails else RealWorld)(Deployment(settings), lambda record: pipeline)
    with open_pipelines(settings, env={}) as store:
        made = store.create(as_pipeline(pipeline), secrets={}, who="ada", saga=Saga(who="ada").to_json())
        ready = run(store, made, world)
        if fails:
            assert ready is None
        else:
            assert ready is not None
            assert topics == {"in", "more", "flights.errors", "somebody-else-s"}
            saga = Saga.from_json(ready.saga).deleting("ada").to_json()
            assert run(store, store.move(ready, phase=Phase.DELETING, saga=saga), world) is None
    assert topics == {"in", "somebody-else-s"}
