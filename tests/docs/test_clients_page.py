"""The examples of docs/clients.md run as they stand, one after the other, and give what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.client.client import Client
from millrace.node.ingest.in_process import catch_up
from tests.docs.pages import python_blocks
from tests.docs.test_examples import run


def test_the_examples_of_the_clients_page_run_and_give_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    monkeypatch.setenv("MILLRACE_DATA", str(settings.data_dir))
    monkeypatch.setenv("MILLRACE_CACHE", str(settings.cache_dir))
    names: dict[str, Any] = {}
    printed = []
    try:
        for block in python_blocks("docs/clients.md"):
            if "delete_where" in block.text or "client.read" in block.text:
                catch_up(settings, names["client"].log)  # what the streaming node does
            printed.append(run(block.text, names))
    finally:
        with Client.connect(settings) as client:
            client.append.service.shutdown()
    assert names["deleted"].keys == 5
    assert printed[3].strip() == "50"
    assert printed[4].strip() == "20"
    assert names["txn"].commit_tick
    assert names["old"].to_pylist()[0] == {"id": 1, "city": "Paris"}
    assert names["young"] >= 1
    assert names["careful"].spool is not None
    assert names["seen"] >= 80
    assert names["cities"][1] == "Paris"
    assert names["cities"][500] == "Quito"
    with pytest.raises(Exception, match="closed"):
        names["producer"].insert(names["people"], names["pa"].table({"id": [1], "city": ["x"]}))
