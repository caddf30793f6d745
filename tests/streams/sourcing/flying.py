"""Aircraft as aggregates: their flights as events, by which the tests of event sourcing fold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.events import EventTypes

EVENTS = EventTypes()


@EVENTS.register()
@dataclass(frozen=True)
class Registered:
    owner: str


@EVENTS.register(version=2)
@dataclass(frozen=True)
class Flown:
    flight: str
    distance: int
    delay: int | None
    dest: str


@EVENTS.upcaster("Flown", 1)
def _without_destination(data: dict[str, Any]) -> dict[str, Any]:
    return data | {"dest": "?"}


@dataclass(frozen=True)
class Aircraft:
    owner: str = ""
    flights: int = 0
    miles: int = 0
    late: int = 0
    at: str = ""


def after(state: Aircraft, event: Registered | Flown) -> Aircraft:
    if isinstance(event, Registered):
        return replace(state, owner=event.owner)
    return replace(
        state,
        flights=state.flights + 1,
        miles=state.miles + event.distance,
        late=state.late + late(event),
        at=event.dest,
    )


def late(event: Flown) -> int:
    return event.delay is not None and event.delay > 15


AIRCRAFT = Aggregate(events=EVENTS, initial=Aircraft, fold=after)


def flown(number: int, *, distance: int = 100) -> Flown:
    return Flown(f"F{number}", distance, number % 40, "BOS")
