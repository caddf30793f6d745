"""Which Millrace this is and where it lies, for processes that are started with the same code. The face (`millrace`) is for users."""

from __future__ import annotations

from pathlib import Path
from typing import Final

VERSION: Final = "0.1.0"

ROOT: Final = Path(__file__).resolve().parents[2]
"""The folder that a process needs on its path to import the package."""
