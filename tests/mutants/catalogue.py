"""The mutants: single changes to the code that would lose, double or leak something, each with the test that kills it.

They stand in ``mutants.toml``, one a place where a test once did not bite, or easily could not. A change is a text that
occurs exactly once in its file, and what stands there instead.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("mutants.toml")


class DoesNotApply(Exception):
    """The text that a mutant changes is not in its file, or is there more than once."""


@dataclass(frozen=True)
class Mutant:
    """One change."""

    name: str
    file: str
    old: str
    new: str
    test: str
    """The test that kills it: a path and a name, as pytest takes them."""
    why: str
    """What would go wrong."""

    def changed(self, text: str) -> str:
        """The file's `text` with the change. Raises DoesNotApply."""
        found = text.count(self.old)
        if found != 1:
            raise DoesNotApply(
                f"mutant {self.name!r}: its text stands {found} times in {self.file}: the code has moved on. Put the"
                " same"
                " harm to the code as it is now, see its test fail with it, or take the mutant out with what it guarded"
            )
        return text.replace(self.old, self.new)

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """The change, made in the tree at `root` for a while. Raises DoesNotApply."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(self.changed(text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")


def mutants() -> list[Mutant]:
    """All of them."""
    return [Mutant(**each) for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["mutant"]]
