"""Generate docs/api.md from the docstrings of the public API: ``python -m tests.docs.api``."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from typing import Any

import millrace
import millrace.spark
import millrace.testing
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "api.md"

PARTS: dict[str, list[str]] = {
    "Connecting": ["connect", "Database", "Settings"],
    "Collections": ["Collection", "schema", "Schema", "Field"],
    "Writing": ["Written", "Transaction", "Broadcast", "Producer", "BatchLimits", "AsyncProducer"],
    "Consuming": [
        "Change", "ChangeStream", "Consumer", "Delivery", "AsyncConsumer", "ParallelConsumer",
        "All", "Latest", "StartFrom", "StartAfter", "StartAfterTick",
    ],
    "Patterns": ["match_recognize", "row", "permute"],
    "Event sourcing": ["EventTypes", "Aggregate", "EventStore", "Command"],
    "Errors": ["MillraceError", "errors"],
}  # fmt: skip

HEAD = """# Python API

The public API is `import millrace` with the names on this page, and the modules `millrace.spark` and
`millrace.testing`. Everything else is internal and may change without notice. `python -m tests.docs.api` generates this
page from the docstrings. The programs under [examples/](../examples) and the [guides](clients.md#guides) show the names
in use.
"""

UNFOLDED = {"Settings", "Schema", "Field", "MillraceError"}
"""Classes whose members other pages explain, or that a program does not need."""


SPARK = ("read", "register", "register_published", "changes_between", "stream")
"""The names of millrace.spark; another page explains the session."""


def page() -> str:
    """Return the page for the present code."""
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
        text = f"{_words(thing)} [Operating](operating.md#errors) lists every error."
        return f"### {title}\n\n{_wrapped(text)}\n"
    if not inspect.isclass(thing):
        return f"### {title}\n\n{_signature(title, thing)}\n{_wrapped(_words(thing))}\n"
    lines = [f"### {title}\n", _wrapped(_words(thing)), ""]
    for each, member in vars(thing).items():
        if each.startswith("_") or name in UNFOLDED or not (words := _words(member)):
            continue
        if isinstance(member, property):
            lines.append(_item(each, words))
        elif inspect.isfunction(member):
            lines.append(_item(f"{each}{_arguments(member)}", words))
    return "\n".join(lines).rstrip() + "\n"


def _item(name: str, words: str) -> str:
    return _wrapped(f"- **`{name}`** {words}", indent="    ")


def _wrapped(text: str, *, indent: str = "") -> str:
    """Wrap paragraphs to the width of the page. Leave lists and code blocks inside them as they are.

    `indent` belongs to all but the first paragraph: a list item's further paragraphs need four spaces on the site.
    """
    first, *others = text.split("\n\n")
    paragraphs = [_filled(first, "", indent)]
    for each in others:
        as_it_is = re.search(r"^(\s|- )", each, re.MULTILINE)
        paragraphs.append(textwrap.indent(each, indent) if as_it_is else _filled(each, indent, indent))
    return "\n\n".join(paragraphs)


def _filled(text: str, first: str, rest: str) -> str:
    wrapper = textwrap.TextWrapper(
        118, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text)


def _signature(title: str, function: Any) -> str:
    call = f"{title}{_arguments(function)}"
    if len(call) > 118:
        call = _filled(call, "", "    ")
    return f"```text\n{call}\n```\n"


def _arguments(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _words(thing: Any) -> str:
    """Return the docstring with its references as code."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):  # a dataclass without a docstring of its own
        return ""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return text.strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is made\n")
