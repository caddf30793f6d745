"""The drawings of the pages are those that tools/diagrams.py draws."""

from __future__ import annotations

import runpy

from tests.docs.code_facts import ROOT
from tests.docs.pages import PAGES, links


def test_each_drawing_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "diagrams.py"))["files"]()
    old = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not old, "run python tools/diagrams.py"


def test_each_drawing_is_on_a_page_in_light_and_dark() -> None:
    shown = {link.rpartition("/")[2] for page in PAGES for link in links(page)}
    assert {path.name for path in (ROOT / "docs" / "images").glob("*.svg")} <= shown
