"""One bit of every kind of durable file flipped: which answer that gives, as docs/operating.md says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from millrace.access.grants import Grant, Role
from millrace.access.token_file import TokenFile
from tests.golden.flips import FOOTERS, KINDS, ROOT, answers
from tests.golden.make_deployment import make

FLIPS = 24
"""Of each kind; Arrow and RocksDB are opened for each."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_of_file_gives_the_answers_that_its_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, scratch = tmp_path / "made", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(root)
    (root / "facts.json").write_text(json.dumps(make(root)))
    TokenFile(root / "data").add("shop", (Grant(Role.PRODUCE, ("users",)),))
    os.chdir(ROOT)
    found = answers(root, scratch, FLIPS)
    wrong = {}
    for kind in KINDS:
        bad = [words for words in found[kind.name] if not words.startswith(kind.answers)]
        if bad or not found[kind.name]:
            wrong[kind.name] = bad
    assert not wrong


def test_the_table_of_answers_names_every_kind() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    table = page.partition("## What a damaged file does")[2].partition("\n## ")[0]
    named = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert named == [*(kind.name for kind in KINDS), FOOTERS]
