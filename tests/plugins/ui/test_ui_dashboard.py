"""The Grafana dashboard asks for metrics that there are, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millrace.base.metrics import FAMILIES, NAMESPACE, MetricFamily

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "millrace.json"
GRAFANA_LABELS = {"le"}


def _exposed(name: str, family: MetricFamily) -> set[str]:
    """The names of a family's series, as Prometheus sees them."""
    whole = f"{NAMESPACE}_{name}"
    if family.kind == "histogram":
        return {f"{whole}_{part}" for part in ("bucket", "sum", "count")}
    return {f"{whole}_total" if family.kind == "counter" and not whole.endswith("_total") else whole}


SERIES = {series: family for name, family in FAMILIES.items() for series in _exposed(name, family)}


def _expressions() -> list[tuple[str, str]]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", ())]
    found += [(each["name"], each["query"]["query"]) for each in board["templating"]["list"] if each["type"] == "query"]
    return found


@pytest.mark.parametrize(("title", "expression"), _expressions())
def test_each_panel_asks_for_what_is_exposed(title: str, expression: str) -> None:
    names = re.findall(rf"\b{NAMESPACE}_\w+", expression)
    assert names, title
    assert not [name for name in names if name not in SERIES], title
    labels = {label for name in names for label in SERIES[name].labels} | GRAFANA_LABELS
    asked = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    for listed in re.findall(r"\bby \(([^)]*)\)", expression):
        asked |= {each.strip() for each in listed.split(",")}
    if expression.startswith("label_values"):
        asked.add(expression.rpartition(",")[2].strip(" )"))
    assert asked <= labels, title
    for name in names:
        if SERIES[name].kind == "counter":
            assert re.search(rf"(rate|increase)\({name}", expression), f"{title}: a counter is shown as a rate"


def test_panels_have_names_places_and_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for each in panels:
        place = each["gridPos"]
        cells = {(place["x"] + column, place["y"] + line) for column in range(place["w"]) for line in range(place["h"])}
        assert not cells & taken, each["title"]
        taken |= cells
    assert {"Lag of the WAL", "Rejections by reason"} <= {each["title"] for each in panels}


def test_a_panel_asks_only_for_what_some_process_reports() -> None:
    reported = {series for name in FAMILIES for series in _exposed(name, FAMILIES[name])}
    asked = {name for _, expression in _expressions() for name in re.findall(rf"\b{NAMESPACE}_\w+", expression)}
    assert asked <= reported
