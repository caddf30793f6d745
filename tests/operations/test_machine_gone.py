"""A machine is gone: with log, tables and catalog elsewhere, nothing of it is needed to go on."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from millrace.coord.catalog.shared import SharedCatalog
from millrace.meta.sql import SqlStore
from millrace.node.publish.definition import publish
from millrace.operations.published_verification import verify_published
from millrace.operations.verification import verify_collections
from millrace.storage.store import list_below, store_at
from tests.operations.backup_world import World, settings_in
from tests.s3_server import bucket

STEPS = [
    "insert",
    "insert",
    "import",
    "flush",
    "begin",
    "body",
    "delete",
    "compact",
    "field",
    "insert",
    "node",
    "import",
]

LOCAL = {
    "coord": "a copy of the catalog that the meta store has",
    "log": "a copy of the list of the log's backends, and here the log itself",
    "run": "addresses, locks and reports of processes",
    "tables": "a copy of the key index",
}
"""Folders of a data folder whose tables lie elsewhere, and what they are for (docs/object-stores.md)."""


def digests(world: World) -> dict[int, tuple[int, int]]:
    reports = verify_collections(world.settings)
    assert all(each.ok for each in reports.values())
    return {number: (each.stored, each.table_digest) for number, each in reports.items()}


def test_a_new_machine_opens_what_the_store_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    with bucket(monkeypatch) as uri:
        elsewhere = {"tables": f"{uri}/tables"}

        def opened(folder: str, **more: object) -> World:
            shared = SharedCatalog(SqlStore.in_file(tmp_path / "meta.db", monotonic))
            return World(replace(settings_in(tmp_path / folder / "data"), **elsewhere), shared=shared, **more)  # type: ignore[arg-type]

        first = opened("first")
        for number, kind in enumerate(STEPS):
            first.step(kind, number)
        first.settle()
        for each in first.coordinator.collections():
            publish(first.settings, each.id)
        found, model, content = digests(first), deepcopy(first.model), first.content()
        assert content == model.rows
        first.close()
        here = {name.partition("/")[0] for name in list_below(store_at(first.settings.data_dir)) if "/" in name}
        assert here <= LOCAL.keys(), "docs/object-stores.md lists what lies here"
        (tmp_path / "second" / "data").mkdir(parents=True)
        # An embedded log stands for one on brokers: it is all that survives.
        shutil.move(tmp_path / "first" / "data" / "log", tmp_path / "second" / "data" / "log")
        shutil.rmtree(tmp_path / "first")
        shutil.rmtree(tmp_path / "cache")

        second = opened("second", model=model)
        try:
            assert digests(second) == found
            assert second.content() == content
            second.epoch = second.coordinator.next_epoch(1)
            second.model.sequences.clear()
            for number in range(3):
                second.step("insert", number)
            second.step("import", 0)
            second.settle()
            assert second.content() == second.model.rows
            for each in second.coordinator.collections():
                publish(second.settings, each.id)
            assert all(each.ok for each in verify_published(second.settings, second.log).values())
        finally:
            second.close()
