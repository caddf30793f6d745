"""An aggregate: an initial state, a fold over events, and the canonical JSON form of its states.

The state of a key is ``fold(... fold(fold(initial(), e1), e2) ..., en)`` and a function of the key's events alone. The
fold reads no clock, no random numbers and nothing else outside its arguments, so a rebuild anywhere gives the same
state. Equal states have equal canonical JSON: keys are sorted, and so are the members of sets.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, Final, Generic, TypeVar

import pydantic_core

from millrace.base.errors import InvalidArgument
from millrace.streams.sourcing.events import EventTypes, codec_of, is_struct

S = TypeVar("S")

_PLAIN: Final = (str, int, float, bool, type(None))


class Aggregate(Generic[S]):
    """The states of one kind of thing, as folds over its events.

        accounts = Aggregate(events=account, initial=Account, fold=apply)

    `fold(state, event)` returns the next state. It may change the state that it is given and return that. `version` is
    the number of the fold's code: raise it if states become others for a reason that :attr:`fingerprint` does not see.
    """

    def __init__(
        self,
        *,
        events: EventTypes,
        initial: Callable[[], S],
        fold: Callable[[S, Any], S],
        version: int = 1,
    ) -> None:
        """Raises InvalidArgument if the states have no JSON form."""
        self.events = events
        self.initial = initial
        self.fold = fold
        self.version = version
        self._state = type(initial())
        self._codec = codec_of(self._state)
        self.encode(initial())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the fold's code: snapshots of another are not used.

        It covers `version`, the event types and their versions, the class of the states, and the code of `initial`,
        `fold` and the upcasters with the functions of their modules that they name. Code of other modules, and data
        that a function reads, are not covered: raise `version` when they change.
        """
        parts: list[object] = [self.version, self._state.__qualname__, _annotations(self._state)]
        parts += [(each.name, each.version, _annotations(each.kind)) for each in self.events.types()]
        seen: set[int] = set()
        parts += _code(self.initial, seen)
        parts += _code(self.fold, seen)
        for name, version, function in self.events.upcasters():
            parts += [name, version, *_code(function, seen)]
        return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]

    def apply(self, state: S, events: Iterable[Any]) -> S:
        """Return the state after `events`."""
        fold = self.fold
        for event in events:
            state = fold(state, event)
        return state

    def encode(self, state: S) -> str:
        """Return a state's canonical JSON. Raises InvalidArgument if it has none."""
        try:
            if is_struct(type(state)):
                return self._codec.encode(state)
            return json.dumps(_canonical(_fields(state)), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        except (pydantic_core.PydanticSerializationError, TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"a state of type {type(state).__name__} has no JSON form: {error}") from None

    def decode(self, text: str) -> S:
        """Return the state of canonical JSON. Raises ValueError if it is not one."""
        found: S = self._codec.decode(text)
        return found


def _fields(value: Any) -> Any:
    """Return the fields of a dataclass instance or pydantic model, else the value."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if hasattr(type(value), "model_fields"):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return value


def _canonical(value: Any) -> Any:
    """Return JSON values that are equal for equal values, whatever the order of a set or the hash seed."""
    if type(value) in _PLAIN:
        return value
    value = _fields(value)
    if isinstance(value, Mapping):
        return {_key(key): _canonical(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_canonical, value), key=lambda each: json.dumps(each, sort_keys=True))
    return pydantic_core.to_jsonable_python(value)


def _key(key: Any) -> str:
    [text] = pydantic_core.to_jsonable_python({key: None})
    return str(text)


def _annotations(kind: Any) -> list[tuple[str, str]]:
    """Return the fields of a class and its bases with their types, as text."""
    found: dict[str, str] = {}
    for each in reversed(getattr(kind, "__mro__", (kind,))):
        found |= {name: str(what) for name, what in vars(each).get("__annotations__", {}).items()}
    return sorted(found.items())


def _code(function: Any, seen: set[int]) -> Iterator[object]:
    """Yield what identifies a function's code, and that of functions of its module that it names."""
    if isinstance(function, functools.partial):
        yield from (repr(function.args), repr(sorted(function.keywords.items())))
        yield from _code(function.func, seen)
        return
    function = getattr(function, "__func__", function)
    for _, each in sorted(getattr(function, "registry", {}).items(), key=lambda pair: pair[0].__qualname__):
        yield from _code(each, seen)  # functools.singledispatch
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        if isinstance(function, type):
            yield function.__qualname__
        elif callable(function):
            method = type(function).__call__
            yield from _code(method, seen) if isinstance(method, FunctionType) else ()
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    yield from _instructions(function.__code__)
    named = [function.__globals__.get(name) for name in _names(function.__code__)]
    closed = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    for each in [*named, *closed]:
        if isinstance(each, _PLAIN):
            yield each
        elif isinstance(each, Mapping):
            for inner in each.values():
                yield from _code(inner, seen) if _is_own(inner, function) else ()
        elif _is_own(each, function):
            yield from _code(each, seen)


def _is_own(value: Any, function: FunctionType) -> bool:
    value = getattr(value, "__wrapped__", value)
    return isinstance(value, FunctionType) and value.__module__ == function.__module__


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _instructions(code: CodeType) -> Iterator[object]:
    yield from (code.co_code, code.co_names, code.co_varnames)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _instructions(const)
        else:
            yield sorted(const, key=repr) if isinstance(const, frozenset) else const


def _names(code: CodeType) -> list[str]:
    found = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found += _names(const)
    return found
