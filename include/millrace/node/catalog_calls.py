"""The coordinator for clients on other hosts: catalog, terms, epochs and DDL, called by name with JSON in and JSON out.

Such a client has no data folder to open the coordinator's store in; the process that serves the log has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from millrace.coord.coordinator import Coordinator
from millrace.coord.store import Collection
from millrace.errors import InvalidArgument
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.append_host_outcome import AppendOutcome
from millrace.wal.definitions import Definitions


class Judging(Protocol):
    """An append host, or a client of one."""

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float) -> AppendOutcome: ...

    def definitions(self, pchannel: str, collection_id: int | None, *, deadline: float) -> Definitions: ...


class OneByOne:
    """An append host as the coordinator sees it (millrace.coord.coordinator.Appending)."""

    def __init__(self, append: Judging, deadline: float) -> None:
        self._append = append
        self._deadline = deadline

    def append_one(self, pchannel: str, entry: bytes) -> int:
        return self._append.append(pchannel, [entry], deadline=self._deadline).result().time_tick

    def definitions(self, pchannel: str, collection_id: int | None) -> Definitions:
        return self._append.definitions(pchannel, collection_id, deadline=self._deadline)


Arguments = Mapping[str, Any]
_NAMES: Final = ("name", "partition", "pchannel")


def collection_to_json(collection: Collection) -> dict[str, Any]:
    """A collection's definition as JSON."""
    return {
        "id": collection.id,
        "name": collection.name,
        "state": collection.state,
        "vchannels": list(collection.vchannels),
        "schemas": [schema.to_json() for schema in collection.schemas],
        "partitions": collection.partitions,
        "next_partition": collection.next_partition,
    }


def collection_from_json(value: Mapping[str, Any]) -> Collection:
    """Inverse of :func:`collection_to_json`."""
    return Collection(
        id=int(value["id"]),
        name=str(value["name"]),
        state=str(value["state"]),
        vchannels=tuple(value["vchannels"]),
        schemas=tuple(CollectionSchema.from_json(schema) for schema in value["schemas"]),
        partitions={str(name): int(number) for name, number in value["partitions"].items()},
        next_partition=int(value["next_partition"]),
    )


def _next_epoch(coordinator: Coordinator, given: Arguments) -> dict[str, Any]:
    held = given.get("held")
    return {"epoch": coordinator.next_epoch(int(given["producer_id"]), held=None if held is None else int(held))}


def _create(coordinator: Coordinator, given: Arguments) -> dict[str, Any]:
    schema = CollectionSchema.from_json(given["schema"])
    made = coordinator.create_collection(
        given["name"],
        schema,
        vchannels=int(given["vchannels"]),
        partitions=list(given["partitions"]),
        exist_ok=bool(given.get("exist_ok", False)),
    )
    return collection_to_json(made)


def _drop(coordinator: Coordinator, given: Arguments) -> dict[str, Any]:
    coordinator.drop_collection(given["name"])
    return {}


def _drop_partition(coordinator: Coordinator, given: Arguments) -> dict[str, Any]:
    coordinator.drop_partition(given["name"], given["partition"])
    return {}


CALLS: Final[dict[str, Callable[[Coordinator, Arguments], dict[str, Any]]]] = {
    "term": lambda coordinator, given: {"term": coordinator.term(given["pchannel"])},
    "next_epoch": _next_epoch,
    "collection": lambda coordinator, given: collection_to_json(coordinator.collection(given["name"])),
    "collections": lambda coordinator, given: {
        "collections": [collection_to_json(each) for each in coordinator.collections()]
    },
    "create_collection": _create,
    "drop_collection": _drop,
    "create_partition": lambda coordinator, given: {
        "id": coordinator.create_partition(given["name"], given["partition"])
    },
    "drop_partition": _drop_partition,
    "add_field": lambda coordinator, given: {
        "version": coordinator.add_field(given["name"], FieldSpec.from_json(given["field"]))
    },
    "flush": lambda coordinator, given: {"ticks": coordinator.flush(given["name"])},
}
"""What may be called."""

READS: Final = frozenset({"term", "collection", "collections"})
"""Calls that change nothing, and may be repeated."""


def call(coordinator: Coordinator, name: str, arguments: Arguments) -> dict[str, Any]:
    """Do one call. Raises InvalidArgument for an unknown one or arguments that are not its own, and what the call raises."""
    found = CALLS.get(name)
    if found is None:
        raise InvalidArgument(f"the coordinator knows no call {name!r}; it knows {', '.join(CALLS)}")
    wrong = [key for key in _NAMES if not isinstance(arguments.get(key, ""), str)]
    if wrong:
        raise InvalidArgument(f"{name}: {wrong[0]!r} is a name, as text")
    try:
        return found(coordinator, arguments)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise InvalidArgument(f"{name}: the arguments {dict(arguments)!r} are not its own ({error!r})") from error
