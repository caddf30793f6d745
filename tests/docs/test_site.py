"""The site builds: every page is in its navigation, and every link works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "millrace.connect" in re.sub(r"<[^>]+>", "", first)
    outside = [line for line in re.findall(r'(?:src|href)="(https?:[^"]+)"', first) if "squidfunk" not in line]
    assert not [each for each in outside if each.endswith((".js", ".css", ".woff2"))], (
        "a page fetches nothing from elsewhere"
    )


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    docs = ROOT / "docs"
    assert named == {str(path.relative_to(docs)) for path in docs.rglob("*.md")} | {"index.md"}
