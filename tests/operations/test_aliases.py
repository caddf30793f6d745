"""Operations that are told which collections take aliases, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

import millrace.testing
from millrace.base.errors import CollectionNotFound
from millrace.operations.compaction.plan import flushed_collections
from millrace.operations.coverage import Coverage
from millrace.operations.quality.declaration import QualityParams
from millrace.operations.quality.results import read_state
from millrace.operations.quality.run import Selection, _frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


def test_compaction_and_quality_take_a_collection_by_its_alias() -> None:
    with millrace.testing.deployment() as db:
        for name in ("trips-1", "trips-2"):
            db.create_collection(name, {"id": "int64"}, key="id").insert({"id": [1]})
        db.create_alias("trips", "trips-1")
        db.settle()

        def checked(*names: str) -> list[str]:
            selection = Selection(Coverage.load(db.settings, "quality"))
            params = QualityParams(tables=("collections",), collections=names)
            session = cast("Callable[[], SparkSession]", lambda: None)
            assert not list(_frames(session, db.settings, params, read_state(db.settings), selection))
            return [each.stored.name for each in selection.small]

        for given, wanted in (("trips-1", "trips-1"), ("trips-2", "trips-2")):
            db.alter_alias("trips", given)
            assert [each.name for each in flushed_collections(db.settings, ("trips",))] == [wanted]
            assert checked("trips") == [wanted]
        assert sorted(each.name for each in flushed_collections(db.settings, ("trips", "trips-1"))) == [
            "trips-1",
            "trips-2",
        ]
        with pytest.raises(CollectionNotFound, match="knows no collection none"):
            flushed_collections(db.settings, ("trips", "none"))
        with pytest.raises(CollectionNotFound, match="no collection 'none' has stored rows"):
            checked("trips", "none")
