"""Paths of values in a document: ``carrier``, ``origin.airport``, and ``a\\.b`` for a name that contains a dot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

from pydantic import AfterValidator, StringConstraints

MAX_STEPS: Final = 32
_PART: Final = re.compile(r"(?:[^.\\]|\\.)+")
_DATES: Final = {"YYYY": "%Y", "yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H"}
_HOLE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def split(path: str) -> tuple[str, ...]:
    """Return the names of `path`. Raises ValueError if it is not a path."""
    parts: list[str] = []
    place = 0
    while True:
        found = _PART.match(path, place)
        if found is None:
            raise ValueError(
                f"{path!r} is not a path: write names with dots between, and a dot or backslash"
                " in a name as \\. or \\\\"
            )
        parts.append(re.sub(r"\\(.)", r"\1", found[0]))
        place = found.end()
        if place == len(path):
            break
        place += 1  # the dot
    if len(parts) > MAX_STEPS:
        raise ValueError(f"{path!r} goes deeper than {MAX_STEPS} names")
    return tuple(parts)


def joined(parts: Sequence[str]) -> str:
    """Return the path of `parts`: the inverse of :func:`split`."""
    return ".".join(part.replace("\\", "\\\\").replace(".", "\\.") for part in parts)


def _checked(path: str) -> str:
    split(path)
    return path


FieldPath: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1000), AfterValidator(_checked)]


class Template(NamedTuple):
    """``{carrier}-{flight}``: texts, and the paths between them."""

    texts: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]


def template(text: str, *, dates: bool = False) -> Template:
    """Parse a template: ``{path}`` is a value's place, ``{{`` and ``}}`` are braces. Raises ValueError.

    With `dates`, ``{+YYYY.MM.dd}`` is one name: the form of a date (:func:`date_form`).
    """
    texts, paths, place, current = [], [], 0, ""
    for hole in _HOLE.finditer(text):
        current += text[place : hole.start()]
        place = hole.end()
        if hole[0] in ("{{", "}}"):
            current += hole[0][0]
        elif hole[1] is None:
            raise ValueError(f"{text!r}: a brace is unpaired; write {{path}} for a value and {{{{ or }}}} for a brace")
        else:
            texts.append(current)
            paths.append((hole[1],) if dates and hole[1].startswith("+") else split(hole[1]))
            current = ""
    if not paths:
        raise ValueError(f"{text!r} has no {{path}}: every document would get the same")
    return Template((*texts, current + text[place:]), tuple(paths))


def date_form(form: str) -> str:
    """Return ``YYYY.MM.dd`` in the form of strftime. Raises ValueError."""

    def one(found: re.Match[str]) -> str:
        if found[0] not in _DATES:
            raise ValueError(f"{form!r}: a date consists of {', '.join(_DATES)} and punctuation")
        return _DATES[found[0]]

    return re.sub("YYYY|yyyy|MM|dd|HH|[A-Za-z]+", one, form.replace("%", "%%"))


def _template_checked(text: str) -> str:
    template(text)
    return text


TemplateText: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=2000), AfterValidator(_template_checked)
]
