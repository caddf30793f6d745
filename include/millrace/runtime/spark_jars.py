"""The former name of :mod:`millrace.runtime.spark.jars`, for ``python -m`` in scripts; for one release."""

from __future__ import annotations

import sys
import warnings

from millrace.runtime.spark.jars import main

if __name__ == "__main__":
    warnings.warn(
        "millrace.runtime.spark_jars is now millrace.runtime.spark.jars: use that name, the old one will go",
        DeprecationWarning,
        stacklevel=1,
    )
    sys.exit(main())
