"""Expressions in CEL and JSON Schemas, checked when they are declared. Both are sandboxed: no clock, file, network or code of Python's.

An expression sees the document as ``doc`` and its record as ``record`` (topic, partition, offset, key, timestamp in ms).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from pydantic import AfterValidator, StringConstraints

from millrace.pipelines.model.part import check_json

DOC: Final = "doc"
RECORD: Final = "record"
MAX_EXPRESSION: Final = 2000
_MACROS: Final = 3
"""Comprehensions in one expression: each may go over a list within another's, so that what it costs grows with their product."""
_COMPREHENSION: Final = re.compile(r"\.\s*(?:map|filter|all|exists|exists_one)\s*\(\s*([A-Za-z_]\w*)")

_MAP: Final = re.compile(r"\.\s*map\s*\(")


def compiled(text: str) -> Any:
    """The program of `text`. Raises ValueError that says what is wrong with it."""
    import cel

    bound = _COMPREHENSION.findall(text)
    if len(bound) > _MACROS:
        raise ValueError(f"has more than {_MACROS} comprehensions (map, filter, all, exists): use several steps")
    try:
        program = cel.compile(text)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"is no CEL: {_short(error)}") from None
    unknown = sorted(set(program.variables()) - {DOC, RECORD, *bound})
    if unknown:
        raise ValueError(
            f"names {', '.join(unknown)}; an expression has {DOC} (the document) and {RECORD} alone: write {DOC}.{unknown[0]}"
        )
    return program


class Loops(NamedTuple):
    """What an expression may multiply: comprehensions, those among them that make a value for each (map), and sums."""

    all: int
    maps: int
    sums: int


def loops_of(text: str) -> Loops:
    """Counted in the text, names within strings too: rather more than it has."""
    return Loops(len(_COMPREHENSION.findall(text)), len(_MAP.findall(text)), text.count("+"))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]


def _checked(text: str) -> str:
    compiled(text)
    return text


Expression: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_EXPRESSION), AfterValidator(_checked)
]


def validator(schema: dict[str, Any], *, formats: bool = True) -> Any:
    """The validator of `schema`. Raises ValueError; a reference to elsewhere is one, and nothing is fetched."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(schema, validate_formats=formats, offline=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"is no JSON Schema: {_short(error)}") from None


def _schema_checked(schema: dict[str, Any]) -> dict[str, Any]:
    check_json(schema)
    validator(schema)
    return schema


Schema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_schema_checked)]
