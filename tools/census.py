"""Print figures about the code: size, comments, repeated class names, words that read badly.

    .venv/bin/python tools/census.py [--insert]

Nothing enforces a limit. Compare two commits by running it in two checkouts. `--insert` also counts the modules that
one insert runs through until its row can be read: client, log server, chain, node and flusher, the last two in this
process.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "include" / "millrace"
SMALL: Final = 70
WIDTH: Final = 120
WORDS: Final = (
    "whoever",
    "behind",
    "together",
    "becoming",
    "kept",
    "elsewhere",
    "told",
    "who needs",
    "what stands",
    "that is none",
)
_TRACED: Final = "CENSUS_TRACE"
_LOOK: Final = 0.1


def main() -> None:
    options = argparse.ArgumentParser(description="Figures about the code.")
    options.add_argument("--insert", action="store_true", help="also count the modules that an insert runs through")
    chosen = options.parse_args()
    found = census()
    if chosen.insert:
        passed = modules_of_an_insert()
        found["modules that an insert passes"] = len(passed)
    print(json.dumps(found, indent=2))


def census() -> dict[str, Any]:
    """Count over all modules of the package."""
    sizes: dict[str, int] = {}
    classes: Counter[str] = Counter()
    words: Counter[str] = Counter()
    comments = code = docstrings = first_lines = wide = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        sizes[path.relative_to(PACKAGE).as_posix()] = len(lines)
        wide += sum(len(line) > WIDTH for line in lines)
        code += sum(bool(line.strip()) for line in lines)
        comments += sum(
            token.type == tokenize.COMMENT and not re.match(r"# (type: ignore|noqa|---)", token.string)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
        )
        lowered = text.lower()
        words.update({word: len(re.findall(rf"\b{word}\b", lowered)) for word in WORDS})
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
                said := ast.get_docstring(node)
            ):
                docstrings += 1
                first_lines += said.partition("\n")[0].rstrip().endswith(".")
    modules = {name: size for name, size in sizes.items() if not name.endswith("__init__.py")}
    return {
        "modules": len(modules),
        f"modules under {SMALL} lines": sum(size < SMALL for size in modules.values()),
        "lines": sum(sizes.values()),
        f"lines over {WIDTH}": wide,
        "comments per 100 lines of code": round(100 * comments / code, 2),
        "docstrings": docstrings,
        "docstrings whose first line is a sentence": first_lines,
        "class names used three times or more": {name: n for name, n in sorted(classes.items()) if n >= 3},
        "words": dict(sorted(words.items())),
    }


def modules_of_an_insert() -> list[str]:
    """Return the modules that run while one row goes from `insert` to `read`: client, server, chain, node, flusher."""
    with tempfile.TemporaryDirectory(prefix="millrace-census-") as made:
        folder = Path(made)
        (folder / "sitecustomize.py").write_text("import census\ncensus.trace()\n", encoding="utf-8")
        os.environ[_TRACED] = str(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(Path(__file__).parent), str(ROOT / "include")])
        sys.path.insert(0, str(ROOT / "include"))
        stop = trace()
        import millrace.testing

        with millrace.testing.deployment() as db:
            rows = db.create_collection("rows", {"id": "int64"}, key="id")
            rows.insert([{"id": 1}])
            rows.read()  # starts every lazy part, so that only the work of one insert is counted from here on
            db.settle()
            (folder / "on").touch()
            time.sleep(2 * _LOOK)
            rows.insert([{"id": 2}])
            rows.read()
            db.settle()
            (folder / "on").unlink()
            time.sleep(4 * _LOOK)
        stop()
        found = [each.read_text(encoding="utf-8").split() for each in folder.glob("*.seen")]
        return sorted(set().union(*found))


def trace() -> Callable[[], None]:
    """Record the package's modules that this process runs while the file `on` exists; return what ends the trace."""
    folder = Path(os.environ[_TRACED])
    inside = str(PACKAGE) + os.sep
    seen: set[str] = set()
    on = threading.Event()
    ended = threading.Event()

    def called(frame: Any, event: str, _: object) -> None:
        if event == "call" and on.is_set() and frame.f_code.co_filename.startswith(inside):
            seen.add(frame.f_code.co_filename.removeprefix(inside))

    def look() -> None:
        while not ended.wait(_LOOK):
            if (folder / "on").exists():
                on.set()
            elif on.is_set():
                on.clear()
                (folder / f"{os.getpid()}.seen").write_text("\n".join(seen), encoding="utf-8")

    threading.Thread(target=look, name="census", daemon=True).start()
    threading.setprofile(called)
    sys.setprofile(called)
    return ended.set


if __name__ == "__main__":
    main()
