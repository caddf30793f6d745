"""Keep pyarrow from importing pandas in Millrace's own processes and in its Spark workers.

pyarrow imports an installed pandas when it makes its first array, to recognise pandas objects. That takes a second of
CPU, more than everything else that such a process does before its first entry. `to_pandas` still works: it imports
pandas then. In any other program (a user's may pass a pandas.Series to pyarrow) importing this module does nothing.

Import this module before any module that makes an array at import time; ``import`` sorts before ``from``.
"""

from __future__ import annotations

import sys
from typing import Final

_OURS: Final = ("millrace.", "pyspark.")
"""Prefixes of the ``python -m`` names of those processes."""


class _NoPandas:
    """A finder that finds no pandas."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name=name)


def hide_pandas_from_arrow() -> None:
    """Make pyarrow look for pandas now and find none. Does nothing if pandas is already imported."""
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(_NoPandas)


def _main_program() -> str:
    """Return the module that this process runs by ``python -m``, or "" for a script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "" if spec is None else str(spec.name)


if _main_program().startswith(_OURS):
    hide_pandas_from_arrow()
