"""The blocks of the how-to guides and of docs/clients.md run as pasted, and print what the pages show."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.testing import deployment
from tests.docs.pages import blocks, python_blocks
from tests.docs.test_examples import run

GUIDES = {
    "docs/clients.md": python_blocks("docs/clients.md"),
    "docs/how-to/alias-collections.md": python_blocks("docs/how-to/alias-collections.md"),
    "docs/how-to/append-rows.md": python_blocks("docs/how-to/append-rows.md"),
    "docs/how-to/choose-a-key.md": python_blocks("docs/how-to/choose-a-key.md"),
    "docs/how-to/consume.md": python_blocks("docs/how-to/consume.md"),
    "docs/how-to/follow-changes.md": python_blocks("docs/how-to/follow-changes.md"),
    "docs/how-to/query-with-sql-engines.md": python_blocks("docs/how-to/query-with-sql-engines.md"),
    "docs/how-to/read-rows.md": python_blocks("docs/how-to/read-rows.md"),
    "docs/how-to/survive-outages.md": python_blocks("docs/how-to/survive-outages.md"),
    "docs/how-to/upsert-and-delete.md": python_blocks("docs/how-to/upsert-and-delete.md"),
    "docs/how-to/use-transactions.md": python_blocks("docs/how-to/use-transactions.md"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("page", GUIDES)
def test_the_blocks_of_a_guide_print_what_it_shows(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(page)
    assert [each.text for each in found if each.language == "python"] == [each.text for each in GUIDES[page]]
    with deployment() as running:  # keeps the tables up to date, as a streaming node does
        monkeypatch.setenv("MILLRACE_DATA", str(running.settings.data_dir))
        names: dict[str, Any] = {}
        for block, after in zip(found, [*found[1:], None], strict=True):
            if block.language == "python":
                printed = run(block.text, names)
                assert printed == (after.text if after is not None and after.language == "text" else "")
