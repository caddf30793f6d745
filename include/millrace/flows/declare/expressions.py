"""Expressions in CEL and JSON Schemas, checked at their declaration.

They are sandboxed: no clock, file, network or Python code. An expression sees the document as ``doc`` and its record as
``record`` (topic, partition, offset, key, timestamp in ms).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from pydantic import AfterValidator, StringConstraints, ValidationInfo

from millrace.flows.declare.part import check_json

DOC: Final = "doc"
RECORD: Final = "record"
MAX_EXPRESSION: Final = 2000
MAX_UNFOLDED: Final = 20_000
"""The most values of a JSON Schema with its references expanded. The validator cannot be interrupted."""
_MACROS: Final = 3
"""Comprehensions in one expression. They may nest, so that the cost grows with the product of their lists."""
_COMPREHENSION: Final = re.compile(r"\.\s*(?:map|filter|all|exists|exists_one)\s*\(\s*([A-Za-z_]\w*)")

_MAP: Final = re.compile(r"\.\s*map\s*\(")


def compiled(text: str) -> Any:
    """Compile `text` as CEL and return the program. Raises ValueError with the fault and its place."""
    import cel

    bound = _COMPREHENSION.findall(text)
    if len(bound) > _MACROS:
        raise ValueError(f"has more than {_MACROS} comprehensions (map, filter, all, exists): use several steps")
    try:
        program = cel.compile(text)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"is not CEL: {_first_fault(error)}") from None
    unknown = sorted(set(program.variables()) - {DOC, RECORD, *bound})
    if unknown:
        raise ValueError(
            f"unknown names {', '.join(unknown)}; an expression has only {DOC} and {RECORD}: write {DOC}.{unknown[0]}"
        )
    return program


class Loops(NamedTuple):
    """The parts of an expression that multiply its cost: comprehensions, the maps among them, and sums."""

    all: int
    maps: int
    sums: int


def loops_of(text: str) -> Loops:
    """Count the loops of `text`. An upper bound: names within strings count, too."""
    return Loops(len(_COMPREHENSION.findall(text)), len(_MAP.findall(text)), text.count("+"))


_FAULT: Final = re.compile(r"ERROR: <input>:(\d+):(\d+): (?:Syntax error: )?(.*?)(?: expecting \{.*?\})?(?: \|.*)?$")


def _first_fault(error: Exception) -> str:
    """Return the parser's first fault with its place, without the long list of expected tokens."""
    text = " ".join(str(error).split()).split(" ERROR: <input>")
    found = _FAULT.match(f"ERROR: <input>{text[1]}") if len(text) > 1 else None
    return _short(error) if found is None else f"line {found[1]}, column {found[2]}: {found[3][:300]}"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]


UNCOMPILED: Final = "uncompiled"
"""A key of a validation's context: skip compiling expressions and schemas; another process does that."""


def _checked(text: str, info: ValidationInfo) -> str:
    if not (info.context or {}).get(UNCOMPILED):
        compiled(text)
    return text


Expression: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_EXPRESSION), AfterValidator(_checked)
]


def validator(schema: dict[str, Any], *, formats: bool = True) -> Any:
    """Return the validator of `schema`. Raises ValueError, also for a remote reference; nothing is ever fetched."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(schema, validate_formats=formats, offline=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"is not a JSON Schema: {_short(error)}") from None


def unfolded(schema: dict[str, Any]) -> int:
    """Return how many values `schema` has with all of its internal references expanded, recursive ones counted once.

    That is the most that a validator visits for one document. A few definitions that refer to each other twice expand
    exponentially.
    """
    named = _named(schema)
    known: dict[int, int] = {}
    under_way: set[int] = set()

    def count(value: Any) -> int:
        if not isinstance(value, dict | list):
            return 1
        if id(value) in under_way:
            return 1
        if id(value) not in known:
            under_way.add(id(value))
            found = 1 + sum(map(count, value.values() if isinstance(value, dict) else value))
            if isinstance(value, dict):
                for name in ("$ref", "$dynamicRef", "$recursiveRef"):
                    if isinstance(reference := value.get(name), str):
                        found += count(_referred(schema, reference, named))
            under_way.discard(id(value))
            known[id(value)] = found
        return known[id(value)]

    definitions = {"$defs", "definitions"}
    return count({name: value for name, value in schema.items() if name not in definitions})


def _referred(schema: dict[str, Any], reference: str, named: Mapping[str, Any]) -> Any:
    """Return the target of a pointer (``#/$defs/a``) or an anchor's name within `schema`; None if it does not exist."""
    if not reference.startswith("#/") and reference != "#":
        return named.get(reference)
    found: Any = schema
    for part in unquote(reference[2:]).split("/") if len(reference) > 1 else ():
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of `schema` that have an id or anchor, by that name. If two share a name, the first counts."""
    found: dict[str, Any] = {}
    for each in _objects(schema):
        for name in [each.get("$id"), each.get("id")]:
            if isinstance(name, str):
                found.setdefault(name, each)
        for name in ("$anchor", "$dynamicAnchor"):
            if name in each:
                found.setdefault(f"#{each[name]}", each)
    return found


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _objects(each)


def _schema_checked(schema: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    check_json(schema)
    if (info.context or {}).get(UNCOMPILED):
        return schema
    if (size := unfolded(schema)) > MAX_UNFOLDED:
        raise ValueError(
            f"its references expand to {size if size < 10**12 else 'over a trillion'} values, and the limit is"
            f" {MAX_UNFOLDED}: refer to each definition once"
        )
    validator(schema)
    return schema


Schema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_schema_checked)]
