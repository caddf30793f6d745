"""docs/event-sourcing.md runs as it stands, and its read model is a flow that can run."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import millrace
import millrace.testing
from millrace.flows.declare.checks import check
from millrace.flows.declare.discovery import declared_flow
from tests.docs.pages import blocks, python_blocks


def test_the_page_runs_and_its_read_model_can(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, upcaster = python_blocks("docs/event-sourcing.md")
    page = ModuleType("page")  # classes of the page look for their module
    monkeypatch.setitem(sys.modules, "page", page)
    names: dict[str, Any] = page.__dict__
    monkeypatch.setattr(millrace, "connect", lambda where: nullcontext(deployment))
    exec(compile(first.text, "<page>", "exec", dont_inherit=True), names)
    store, opened = names["store"], names["opened"]
    assert [store.load("A-17").state.balance, store.load("A-17", at=opened.tick).state.balance] == [70, 100]
    exec(compile(upcaster.text, "<page>", "exec", dont_inherit=True), names)
    assert names["account"].decode("Deposited", 1, '{"amount": 5}') == names["Deposited"](5, "EUR")

    [flow] = [each for each in blocks("docs/event-sourcing.md") if each.language == "yaml"]
    file = tmp_path / "read_model.yaml"
    file.write_text(flow.text)
    settings = replace(deployment.settings, stream_declarations=str(file))
    assert [str(each) for each in check(settings, declared_flow(settings, "deposits_by_day"))] == []
