"""Run an operation: ``python -m millrace.operations NAME [--params JSON] [--result FILE] [--progress FILE]``."""

from __future__ import annotations

import sys

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.errors import MillraceError
from millrace.operations.entry import main
from millrace.operations.registry import find_operation

if __name__ == "__main__":
    try:
        chosen = find_operation(sys.argv[1] if len(sys.argv) > 1 else "")
    except MillraceError as error:
        sys.exit(f"{error.code}: {error}")
    sys.exit(main(chosen, sys.argv[2:]))
