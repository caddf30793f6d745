"""Each step as a function of a document, which it changes in place; the result says whether the document stays.

A step that fails raises Refused. It sees only the document, its record, and (for lookups) the rows of its collection.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import singledispatch
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from millrace.flows.declare import steps
from millrace.flows.declare.expressions import DOC, RECORD, Loops, compiled, loops_of, validator
from millrace.flows.declare.paths import joined, split, template
from millrace.flows.documents import MISSING, Document, Refused, getter, plain, setter, taker
from millrace.flows.records import Record
from millrace.flows.transform.casts import CASTS, to_string

MAX_NAMES: Final = 10_000
"""The most names of a flattened document."""
MAX_DOCUMENT_BYTES: Final = 32 << 20
"""The most bytes of a record's value and of a document. A larger one is an error."""
MAX_MADE_ID: Final = 32 << 10
"""The most characters of an id from a template. Sinks allow fewer."""
MAX_ROUNDS: Final = 1_000_000
"""The most rounds of an expression's nested comprehensions on one document."""
MAX_VALUES: Final = 30_000_000
"""The most values that comprehensions may put into lists, on one document."""


class Context:
    """The inputs and outputs of a step besides the document."""

    __slots__ = ("id", "record")

    def __init__(self) -> None:
        self.record: Record | None = None
        self.id: str | None = None


class Rows(Protocol):
    """The rows of a collection, by their primary key (as text)."""

    def get(self, key: str, /) -> Mapping[str, Any] | None: ...


Open: TypeAlias = Callable[[steps.Lookup], Rows]
"""Opens a lookup's collection."""

Apply: TypeAlias = Callable[[Document, Context], bool]


class Operator(NamedTuple):
    """A compiled step."""

    name: str
    apply: Apply


def compile_step(step: steps.Step, place: int, open_rows: Open) -> Operator:
    """Compile the step at `place` (from 0). Raises ValueError, as its model does."""
    kind: str = step.kind  # type: ignore[attr-defined]
    return Operator(step.name or f"{place}.{kind}", _compile(step, open_rows))


@singledispatch
def _compile(step: steps.Step, open_rows: Open) -> Apply:
    raise TypeError(f"there is no operator for {step!r}")


@_compile.register
def _rename(step: steps.Rename, open_rows: Open) -> Apply:
    if len(step.fields) == 1:
        ((old, new),) = step.fields.items()
        take, put = taker(split(old)), setter(split(new))

        def move(document: Document, context: Context) -> bool:
            value = take(document)
            if value is not MISSING:
                put(document, value)
            return True

        return move
    moves = [(taker(split(old)), setter(split(new))) for old, new in step.fields.items()]

    def move_all(document: Document, context: Context) -> bool:
        # Remove all before setting any, so that two names can be swapped.
        for value, put in [(take(document), put) for take, put in moves]:
            if value is not MISSING:
                put(document, value)
        return True

    return move_all


@_compile.register
def _cast(step: steps.Cast, open_rows: Open) -> Apply:
    casts = [(path, getter(split(path)), setter(split(path)), CASTS[kind]) for path, kind in step.fields.items()]

    def apply(document: Document, context: Context) -> bool:
        for path, get, put, cast in casts:
            value = get(document)
            if value is not MISSING and value is not None:
                try:
                    put(document, cast(value))
                except Refused as error:
                    raise Refused(error.kind, f"{path}: {error}") from None
        return True

    return apply


@_compile.register
def _drop(step: steps.Drop, open_rows: Open) -> Apply:
    takes = [taker(split(path)) for path in step.fields]

    def apply(document: Document, context: Context) -> bool:
        for take in takes:
            take(document)
        return True

    return apply


@_compile.register
def _constant(step: steps.Constant, open_rows: Open) -> Apply:
    puts = [(setter(split(path)), value, isinstance(value, dict | list)) for path, value in step.fields.items()]

    def apply(document: Document, context: Context) -> bool:
        for put, value, mutable in puts:
            put(document, copy.deepcopy(value) if mutable else value)
        return True

    return apply


@_compile.register
def _template_id(step: steps.TemplateId, open_rows: Open) -> Apply:
    made = template(step.template)
    first = made.texts[0]
    parts = [(path, getter(path), text) for path, text in zip(made.paths, made.texts[1:], strict=True)]
    put = setter(split(step.into)) if step.into is not None else None

    def apply(document: Document, context: Context) -> bool:
        found = first
        for path, get, text in parts:
            value = get(document)
            if value is MISSING or value is None:
                raise Refused(
                    "NO_ID", f"{joined(path)} is {'missing' if value is MISSING else 'null'}, and the id needs it"
                )
            found += (value if type(value) is str else to_string(value)) + text
            if len(found) > MAX_MADE_ID:
                raise Refused("ID_LENGTH", f"the id has more than {MAX_MADE_ID} characters")
        context.id = found
        if put is not None:
            put(document, found)
        return True

    return apply


@_compile.register
def _lookup(step: steps.Lookup, open_rows: Open) -> Apply:
    get, put, rows = getter(split(step.key)), setter(split(step.into)), open_rows(step)

    def apply(document: Document, context: Context) -> bool:
        value = get(document)
        row = None if value is MISSING or value is None else rows.get(to_string(value))
        if row is not None:
            put(document, {name: row.get(name) for name in step.take} if step.take else dict(row))
        elif step.missing == "null":
            put(document, None)
        elif step.missing == "error":
            found = "missing" if value is MISSING else repr(value)[:80]
            raise Refused("NO_ROW", f"{step.key} is {found}, and collection {step.collection} has no such row")
        return True

    return apply


@_compile.register
def _flatten(step: steps.Flatten, open_rows: Open) -> Apply:
    separator, lists = step.separator, step.lists == "index"

    def flatten(value: Any, name: str, depth: int, found: Document, left: int) -> int:
        """Add the flat names to `found`; return how many of `left` characters for names remain."""
        if depth and value and (type(value) is dict or (lists and type(value) is list)):
            for inner, each in value.items() if type(value) is dict else enumerate(value):
                left = flatten(each, f"{name}{separator}{inner}" if name else str(inner), depth - 1, found, left)
            return left
        # A long name becomes part of each name below it, so one megabyte may become ten gigabytes.
        left -= len(name)
        if left < 0:
            raise Refused("TOO_LARGE", f"the names of the flat document have more than {MAX_DOCUMENT_BYTES} characters")
        if name in found:
            raise Refused("TWO_VALUES", f"two values would get the name {name!r}")
        if len(found) >= MAX_NAMES:
            raise Refused("TOO_MANY_NAMES", f"a flattened document has at most {MAX_NAMES} names")
        found[name] = value
        return left

    def apply(document: Document, context: Context) -> bool:
        found: Document = {}
        flatten(document, "", step.depth + 1, found, MAX_DOCUMENT_BYTES)
        if document:
            document.clear()
            document.update(found)
        return True

    return apply


@_compile.register
def _filter(step: steps.Filter, open_rows: Open) -> Apply:
    evaluate = evaluator(step.keep)

    def apply(document: Document, context: Context) -> bool:
        answer = evaluate(document, context)
        if type(answer) is not bool:
            raise Refused("NO_BOOL", f"{step.keep!r} returned {repr(answer)[:80]}, which is neither true nor false")
        return answer

    return apply


@_compile.register
def _compute(step: steps.Compute, open_rows: Open) -> Apply:
    made = [(path, setter(split(path)), evaluator(text)) for path, text in step.fields.items()]

    def apply(document: Document, context: Context) -> bool:
        for value, put, path in [(evaluate(document, context), put, path) for path, put, evaluate in made]:
            put(document, _json(value, path))
        return True

    return apply


@_compile.register
def _validate(step: steps.Validate, open_rows: Open) -> Apply:
    found = validator(step.schema_, formats=step.formats)
    is_valid, errors = found.is_valid, found.iter_errors

    def first_of(document: Document) -> Any:
        return None if is_valid(document) else next(iter(errors(document)), None)

    def apply(document: Document, context: Context) -> bool:
        try:
            try:
                first = first_of(document)
            except ValueError:  # a type that it does not know: Digits
                first = first_of(plain(document))
        except ValueError as error:
            raise Refused("SCHEMA", f"cannot be checked: {str(error)[:300]}") from None
        if first is None:
            return True
        place = "/".join(str(part) for part in first.instance_path)
        raise Refused("SCHEMA", f"/{place}: {str(first.message)[:300]}")

    return apply


_NAMED: Final = re.compile(
    r"""\bdoc\b\s*(?:\.\s*([A-Za-z_]\w*)(?!\w)(?!\s*\()|\[\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\])?"""
)


def names_read(expression: str) -> frozenset[str] | None:
    """Return the document's names that `expression` reads, which are passed to it; None if it may read any."""
    found = set()
    for each in _NAMED.finditer(expression):
        name = each[1] or each[2] or each[3]
        if name is None:
            return None
        found.add(name)
    return frozenset(found)


def evaluator(expression: str) -> Callable[[Document, Context], Any]:
    """Return `expression` as a function, which raises Refused on errors. Raises ValueError if it is not valid CEL."""
    execute = compiled(expression).execute
    names = names_read(expression)
    wants_record = re.search(rf"\b{RECORD}\b", expression) is not None
    loops = loops_of(expression)
    may_grow = loops.all > 0 or loops.sums > 0

    def evaluate(document: Document, context: Context) -> Any:
        given = document if names is None else {name: document[name] for name in names if name in document}
        if may_grow:
            _bounded(given, loops)
        values: dict[str, Any] = {DOC: given}
        if wants_record:
            values[RECORD] = _described(context.record)
        try:
            return execute(values)
        except BaseException as error:
            # A panic of the evaluator's native code is not an Exception in Python, but concerns only this document.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise Refused("EXPRESSION", f"{expression[:200]!r}: {reason[:300]}") from None

    return evaluate


def _bounded(given: Document, loops: Loops) -> None:
    """Raise Refused if the expression may take unreasonably long on this document: the evaluator cannot be interrupted.

    Work grows with the longest list for each comprehension. Text grows with the input for each sum.
    """
    values = text = longest = 0
    waiting: list[Any] = [given]
    while waiting:
        value = waiting.pop()
        values += 1
        if type(value) is str:
            text += len(value)
        elif type(value) is dict:
            longest = max(longest, len(value))
            waiting += value.values()
        elif type(value) is list:
            longest = max(longest, len(value))
            waiting += value
    longest *= loops.sums + 1  # sums concatenate lists, too
    rounds: int = longest**loops.all
    made: int = values * longest ** max(loops.maps, loops.all - 1)
    if loops.all and (rounds > MAX_ROUNDS or made > MAX_VALUES):
        raise Refused("TOO_MUCH_WORK", f"a list of {longest} values is too long for {loops.all} comprehensions over it")
    if loops.sums and text * (loops.sums + 1) * max(1, longest**loops.maps) > MAX_DOCUMENT_BYTES:
        raise Refused("TOO_MUCH_WORK", f"{text} characters are too many for {loops.sums} sums over them")


def _described(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {}
    key = None if record.key is None else record.key.decode(errors="replace")
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "key": key,
        "timestamp": record.timestamp,
    }


def _json(value: Any, path: str) -> Any:
    """Return the result of an expression as JSON. Raises Refused."""
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if kind is list:
        return [_json(each, path) for each in value]
    if kind is dict and all(type(name) is str for name in value):
        return {name: _json(each, path) for name, each in value.items()}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise Refused("NO_JSON", f"{path}: {repr(value)[:80]} is not JSON")
