"""The version and location of this package, for processes that run the same code; users import `millrace`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

VERSION: Final = "0.1.0"

ROOT: Final = Path(__file__).resolve().parents[2]
"""The folder that a process needs on its path to import the package."""

HAS_DEMO: Final = (ROOT / "millrace" / "demo").is_dir()
"""Whether this is a checkout: the demo, with its declared stream and derived table, is not in the wheel."""
