"""Spark reaches a table by the store's own options, on each read and write: the session knows of none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest

from millrace.storage.local import LocalStore
from millrace.storage.spark import spark_frame, spark_zorder

OPTIONS = {"fs.s3a.endpoint": "https://box.example", "fs.s3a.access.key": "k"}


class Elsewhere(LocalStore):
    options: Mapping[str, str] = {"AWS_ENDPOINT_URL": "https://box.example"}
    spark_options: Mapping[str, str] = OPTIONS


@pytest.fixture
def store(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path)


def test_a_read_takes_the_stores_options(store: Elsewhere) -> None:
    spark = MagicMock()
    spark_frame(spark, store, 3)
    reader = spark.read.format
    reader.assert_called_once_with("delta")
    reader.return_value.options.assert_called_once_with(**OPTIONS)


def test_an_optimize_takes_the_stores_options(store: Elsewhere) -> None:
    spark = MagicMock()
    with patch("delta.tables.DeltaTable.forPath") as opened:
        spark_zorder(spark, store, ["a.b", "c`d"])
    opened.assert_called_once_with(spark, store.spark_uri, OPTIONS)
    opened.return_value.optimize.return_value.executeZOrderBy.assert_called_once_with("`a.b`", "`c``d`")
