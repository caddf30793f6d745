"""Aggregates: the canonical form of states, and the fingerprint by which snapshots are trusted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial, singledispatch
from types import FunctionType
from typing import Any

import msgspec
import pydantic
import pytest

from millrace.base.errors import InvalidArgument
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.events import EventTypes
from tests.streams.sourcing.flying import AIRCRAFT, Aircraft, Registered, flown


@dataclass
class Basket:
    items: dict[str, int] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)
    total: Decimal = Decimal(0)


class Model(pydantic.BaseModel):
    numbers: list[int] = []
    inner: dict[int, str] = {}


class Record(msgspec.Struct):
    names: set[str] = set()


def of(initial: Callable[[], Any], fold: Callable[[Any, Any], Any] = lambda state, event: state, **more: Any) -> Any:
    return Aggregate(events=EventTypes(), initial=initial, fold=fold, **more)


@pytest.mark.parametrize(
    ("initial", "one", "other"),
    [
        (Basket, Basket({"a": 1, "b": 2}, {"x", "yy", "zzz"}), Basket({"b": 2, "a": 1}, {"zzz", "yy", "x"})),
        (Model, Model(numbers=[1], inner={2: "b", 1: "a"}), Model(numbers=[1], inner={1: "a", 2: "b"})),
        (Record, Record({"x", "yy"}), Record({"yy", "x"})),
        (dict, {"b": [1, 2.5, None], "a": {"c": True}}, {"a": {"c": True}, "b": [1, 2.5, None]}),
        (int, 17, 17),
    ],
)
def test_equal_states_have_equal_json_which_gives_them_back(initial: Any, one: Any, other: Any) -> None:
    found = of(initial)
    assert found.encode(one) == found.encode(other)
    assert found.decode(found.encode(one)) == one
    assert found.encode(one) != found.encode(initial())


def test_a_state_without_json_is_refused_before_the_first_event() -> None:
    with pytest.raises(InvalidArgument, match="JSON"):
        of(lambda: object())


def test_the_fold_is_applied_in_order() -> None:
    state = AIRCRAFT.apply(Aircraft(), [Registered("Ada"), flown(20), flown(3, distance=50)])
    assert state == Aircraft("Ada", 2, 150, 1, "BOS")


# --- fingerprints -----------------------------------------------------------------------------------------------------


def tax(amount: int) -> int:
    return amount * 2


def charged(state: int, event: int) -> int:
    return state + tax(event)


def other_tax(amount: int) -> int:
    return amount * 3


@singledispatch
def dispatched(event: object, state: int) -> int:
    return state


@dispatched.register
def _(event: str, state: int) -> int:
    return state + 1


def test_it_covers_the_fold_and_the_functions_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(int, charged).fingerprint
    assert before == of(int, charged).fingerprint
    with monkeypatch.context() as patched:
        patched.setattr(tax, "__code__", other_tax.__code__)
        assert of(int, charged).fingerprint != before
    assert of(int, charged).fingerprint == before
    assert of(int, charged, version=2).fingerprint != before


def test_it_covers_what_is_bound_closed_over_and_dispatched() -> None:
    def times(factor: int) -> Callable[[int, int], int]:
        return lambda state, event: state + factor * event

    def to(place: int, state: int, event: int) -> int:
        return state + place

    assert of(int, times(2)).fingerprint != of(int, times(3)).fingerprint
    assert of(int, partial(to, 1)).fingerprint != of(int, partial(to, 2)).fingerprint
    before = of(int, dispatched).fingerprint
    inner = dispatched.registry[str]
    assert isinstance(inner, FunctionType)
    code = inner.__code__
    try:
        inner.__code__ = (lambda event, state: state + 2).__code__
        assert of(int, dispatched).fingerprint != before
    finally:
        inner.__code__ = code


def test_it_covers_event_types_their_upcasters_and_the_states_fields() -> None:
    def made(version: int, upcast: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> str:
        known = EventTypes()
        known.register(name="Registered", version=version)(Registered)
        if upcast is not None:
            known.upcaster("Registered", 1)(upcast)
        return Aggregate(events=known, initial=int, fold=charged).fingerprint

    found = {made(1), made(2), made(2, lambda data: data), made(2, lambda data: data | {"owner": "?"})}
    assert len(found) == 4

    def shaped(kind: str) -> Any:
        return dataclass(type("State", (), {"__annotations__": {"a": kind}, "a": 0}))

    assert of(shaped("int")).fingerprint != of(shaped("float")).fingerprint


def test_it_is_the_same_in_another_process() -> None:
    code = "from tests.streams.sourcing.flying import AIRCRAFT; print(AIRCRAFT.fingerprint)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {AIRCRAFT.fingerprint}
