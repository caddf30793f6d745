"""Event types: what is stored of an event, and what later programs make of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest

from millrace.base.errors import EventUndecodable, InvalidArgument
from millrace.streams.sourcing.events import EventTypes


@dataclass
class Paid:
    amount: Decimal
    at: datetime
    tags: tuple[str, ...] = ()


class Shipped(pydantic.BaseModel):
    to: str
    weight: float | None = None


class Counted(msgspec.Struct):
    pieces: int
    by: str = ""


def types(*kinds: type) -> EventTypes:
    made = EventTypes()
    for kind in kinds:
        made.register()(kind)
    return made


@pytest.mark.parametrize(
    "event",
    [
        Paid(Decimal("10.50"), datetime(2026, 3, 1, tzinfo=UTC), ("a", "b")),
        Shipped(to="Oslo", weight=1.5),
        Shipped(to="Oslo"),
        Counted(7, "Ada"),
    ],
)
def test_an_event_comes_back_as_it_was(event: Any) -> None:
    known = types(Paid, Shipped, Counted)
    name, version, text = known.encode(event)
    assert (name, version) == (type(event).__name__, 1)
    assert isinstance(json.loads(text), dict)
    assert known.decode(name, version, text) == event


def three_versions() -> EventTypes:
    made = EventTypes()

    @made.register(name="Moved", version=3)
    @dataclass
    class MovedNow:
        place: str
        floor: int
        by: str

    @made.upcaster("Moved", 1)
    def _(data: dict[str, Any]) -> dict[str, Any]:
        return {"place": data["where"], "floor": 0}

    @made.upcaster("Moved", 2)
    def _(data: dict[str, Any]) -> dict[str, Any]:
        return data | {"by": f"floor {data['floor']}"}

    return made


@pytest.mark.parametrize(
    "event",
    [
        Paid("much", datetime(2026, 1, 1, tzinfo=UTC)),  # type: ignore[arg-type]
        Paid(Decimal("NaN"), datetime(2026, 1, 1, tzinfo=UTC)),
        Shipped.model_construct(to=None),
        Counted("3"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_an_event_that_nobody_could_read_is_not_appended(event: Any) -> None:
    """Neither a dataclass nor a Struct checks its values."""
    with pytest.raises(InvalidArgument, match="cannot be read from its JSON form"):
        types(type(event)).encode(event)


def test_old_versions_go_through_all_upcasters_in_order() -> None:
    found = three_versions()
    assert vars(found.decode("Moved", 1, '{"where": "hall"}')) == {"place": "hall", "floor": 0, "by": "floor 0"}
    assert vars(found.decode("Moved", 2, '{"place": "hall", "floor": 4}'))["by"] == "floor 4"
    assert vars(found.decode("Moved", 3, '{"place": "hall", "floor": 4, "by": "Bob"}'))["by"] == "Bob"


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (("Lost", 1, "{}"), "no event type 'Lost' is registered"),
        (("Moved", 4, "{}"), "version 4, this program knows 3: deploy the newer one"),
        (("Moved", 3, '{"place": "hall"}'), "does not give a MovedNow"),
        (("Moved", 1, "{}"), "does not give a MovedNow: 'where'"),
        (("Moved", 3, "{"), "does not give a MovedNow"),
    ],
)
def test_what_cannot_be_decoded_is_named(stored: tuple[str, int, str], words: str) -> None:
    with pytest.raises(EventUndecodable, match=words):
        three_versions().decode(*stored)


def test_a_version_without_an_upcaster_is_refused() -> None:
    made = EventTypes()
    made.register(version=2)(Paid)
    with pytest.raises(EventUndecodable, match="there is no upcaster from 1 to 2"):
        made.decode("Paid", 1, "{}")


def test_wrong_registrations_are_refused() -> None:
    made = types(Paid)
    with pytest.raises(InvalidArgument, match="an event type 'Paid' is registered already"):
        made.register(name="Paid")(Shipped)
    with pytest.raises(InvalidArgument, match="registered already, as 'Paid'"):
        made.register(name="Other")(Paid)
    with pytest.raises(InvalidArgument, match="names starting with"):
        made.register(name="$erased")(Shipped)
    with pytest.raises(InvalidArgument, match="the version of 'Shipped' is 1 to"):
        made.register(version=0)(Shipped)
    with pytest.raises(InvalidArgument, match="is no dataclass, pydantic model"):
        made.register()(type("Opaque", (), {"__init__": lambda self, x: None}))
    with pytest.raises(InvalidArgument, match="there is nothing to upcast from 1"):
        made.upcaster("Paid", 1)(dict)
    with pytest.raises(InvalidArgument, match="register it before its upcasters"):
        made.upcaster("Moved", 1)(dict)
    with pytest.raises(InvalidArgument, match="Shipped is no registered event type: there are Paid"):
        made.encode(Shipped(to="Oslo"))
