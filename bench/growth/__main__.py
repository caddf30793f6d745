"""Measure one thing that grows, alone: ``python -m bench.growth collections --sizes 10 1000 --only commits``."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from bench.growth.measure import MEASURES
from bench.growth.parts import HISTORY, SIZES, grow, grow_old


def main() -> None:
    """Run the chosen part and print its table; with --output, write the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("name", choices=[*SIZES, "history"])
    parser.add_argument("--sizes", type=int, nargs="+", help="the first is the baseline (default: all sizes)")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=[], help="groups of figures (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="millrace-growth-", dir=options.folder))
    try:
        measured = grow if options.name in SIZES else grow_old
        sizes = options.sizes or SIZES.get(options.name, HISTORY)
        found = measured(base, options.name, sizes, options.quick, options.only)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
