"""The API page matches the docstrings of every public name."""

from __future__ import annotations

import millrace
from tests.docs.api import PAGE, PARTS, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.docs.api"


def test_every_public_name_is_on_it() -> None:
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(set(millrace.__all__) - {"__version__"})


def test_every_name_has_words() -> None:
    for name in millrace.__all__:
        if name != "__version__":
            assert (getattr(millrace, name).__doc__ or "").strip(), name
