"""Importing this has pyarrow leave pandas alone, in processes that are Millrace's own or Spark's workers for it.

pyarrow imports pandas, where that is installed, when it makes its first array, to recognise pandas' objects: a second of CPU, more
than all else that such a process does before its first entry. Whoever asks pyarrow for a DataFrame in such a process gets one all the
same: it imports pandas then. In any other program (a user's, which may hand pyarrow a pandas.Series) nothing happens.

To be imported before whatever makes an array while it is imported: ``import`` comes before ``from`` in a module.
"""

from __future__ import annotations

import sys
from typing import Final

_OURS: Final = ("millrace.", "pyspark.")
"""How the names of such programs begin, as `python -m` has them."""


class _NoPandas:
    """A finder that finds no pandas."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name=name)


def hide_pandas_from_arrow() -> None:
    """Have pyarrow look for pandas now, and find none; nothing where pandas is imported already."""
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(_NoPandas)


def _main_program() -> str:
    """The module that this process runs, by ``python -m``; "" for a script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "" if spec is None else str(spec.name)


if _main_program().startswith(_OURS):
    hide_pandas_from_arrow()
