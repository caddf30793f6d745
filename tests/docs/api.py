"""docs/api.md, made from the docstrings of the public face: ``python -m tests.docs.api``."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import millrace
import millrace.spark
import millrace.testing
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "api.md"

PARTS: dict[str, list[str]] = {
    "Connecting": ["connect", "Database", "Settings"],
    "Collections": ["Collection", "schema", "Schema", "Field"],
    "Writing": ["Written", "Transaction", "Producer", "BatchLimits", "AsyncProducer"],
    "Reading what comes": [
        "Change", "ChangeStream", "Consumer", "Delivery", "AsyncConsumer", "ParallelConsumer",
        "All", "Latest", "StartFrom", "StartAfter", "StartAfterTick",
    ],
    "Patterns": ["match_recognize", "row", "permute"],
    "Errors": ["MillraceError", "errors"],
}  # fmt: skip

HEAD = """# The public names

`import millrace` and what stands here; `millrace.spark` and `millrace.testing` are modules of their own. Everything else is internal
and may change without a word. Made from the docstrings by `python -m tests.docs.api`; the programs under [examples/](../examples)
show the names at work.
"""

UNFOLDED = {"Settings", "Schema", "Field", "MillraceError"}
"""Classes whose members are explained elsewhere, or are of no use to a program."""


SPARK = ("read", "register", "changes_between", "stream")
"""Of millrace.spark: the session is explained elsewhere."""


def page() -> str:
    """The page as the code has it."""
    parts = [HEAD]
    for heading, names in PARTS.items():
        parts.append(f"## {heading}\n")
        parts += [_entry(f"millrace.{name}", name, getattr(millrace, name)) for name in names]
    parts.append("## millrace.spark\n")
    parts += [_entry(f"millrace.spark.{name}", name, getattr(millrace.spark, name)) for name in SPARK]
    parts.append("## millrace.testing\n")
    parts += [_entry("millrace.testing.deployment", "deployment", millrace.testing.deployment)]
    parts += [_entry("millrace.testing.Deployment", "Deployment", millrace.testing.Deployment)]
    return "\n".join(parts)


def _entry(title: str, name: str, thing: Any) -> str:
    if inspect.ismodule(thing):
        return f"### {title}\n\n{_words(thing)} One class an error, with `code`, `retriable` and what to do: [operating](operating.md#errors).\n"
    if not inspect.isclass(thing):
        return f"### {title}\n\n{_signature(title, thing)}\n{_words(thing)}\n"
    lines = [f"### {title}\n", _words(thing), ""]
    for each, member in vars(thing).items():
        if each.startswith("_") or name in UNFOLDED or not (words := _words(member)):
            continue
        if isinstance(member, property):
            lines.append(_item(each, words))
        elif inspect.isfunction(member):
            lines.append(_item(f"{each}{_arguments(member)}", words))
    return "\n".join(lines).rstrip() + "\n"


def _item(name: str, words: str) -> str:
    return f"- **`{name}`** " + words.replace("\n", "\n  ").replace("\n  \n", "\n\n")


def _signature(title: str, function: Any) -> str:
    return f"```text\n{title}{_arguments(function)}\n```\n"


def _arguments(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _words(thing: Any) -> str:
    """The docstring with its references as code, paragraphs as they are."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):  # a dataclass without words of its own
        return ""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return text.strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is made\n")
