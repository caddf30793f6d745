"""DDL kinds: the message that a broadcast sends to each VChannel, its effect there, and valid names.

A message carries its broadcast's id as the epoch of one producer id, with sequence 0. So the chain itself tells a
repeat from another client's message of the same kind (law 8): it answers a repeat with the first result, and refuses
a broadcast that a later one of the collection has overtaken.

If the chain judged a repeat anew, because it has forgotten the producer or (CreateCollection) checks none, the
content decides: :func:`effect_status` tells whether a VChannel has the effect already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from millrace.base.errors import InvalidArgument, MillraceError, UnsupportedVersion
from millrace.catalog.collection import CollectionInfo
from millrace.coord.broadcast.task import BroadcastTask
from millrace.message import builders
from millrace.message.ids import COORDINATOR_ID
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField, SchemaChange, change_from_json
from millrace.wal.definitions import VChannelDefinition

DdlKind: TypeAlias = Literal[
    "create_collection", "drop_collection", "create_partition", "drop_partition", "schema_change", "manual_flush"
]
DDL_KINDS: Final[tuple[DdlKind, ...]] = get_args(DdlKind)


def build_message(broadcast: BroadcastTask, collection: CollectionInfo, vchannel: str, term: int) -> MutableMessage:
    """Return the message that `broadcast` sends to `vchannel`.

    Raises InvalidArgument if no message can express it, UnsupportedVersion for a kind of a newer build.
    """
    build = _MESSAGES.get(broadcast.kind)
    if build is None:
        raise UnsupportedVersion(
            f"unknown broadcast kind {broadcast.kind!r}: run the build that stored it, or a newer one"
        )
    try:
        made = build(collection, vchannel, term, broadcast.change)
    except (MillraceError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{broadcast.kind} of {collection.name!r}: {error}") from error
    return replace(made, producer_id=COORDINATOR_ID, epoch=broadcast.id, sequence=0)


class EffectStatus(NamedTuple):
    """Whether a VChannel can take a broadcast: open (yes), done (it has the effect), or differs (its state
    conflicts).
    """

    state: Literal["open", "done", "differs"]
    detail: str = ""


_OPEN: Final = EffectStatus("open")
_DONE: Final = EffectStatus("done")


def same_collection(collection: CollectionInfo, held: VChannelDefinition | None) -> bool:
    """Return whether a VChannel holds this collection, rather than one that another client created under its id."""
    return held is not None and (held.collection_id, held.name, held.vchannels, held.schemas[0]) == (
        collection.id,
        collection.name,
        collection.vchannels,
        collection.schemas[0],
    )


def effect_status(
    kind: str, change: dict[str, Any], collection: CollectionInfo, held: VChannelDefinition | None
) -> EffectStatus:
    """Return the status of a VChannel of `collection` for a broadcast.

    `held`: the chain's definition there, None if it has no collection of that id.
    """
    if kind == "create_collection":
        if held is None:
            return _OPEN
        return (
            _DONE
            if same_collection(collection, held)
            else EffectStatus("differs", "has another collection with that id")
        )
    if kind == "drop_collection":
        return _OPEN if same_collection(collection, held) else _DONE
    if held is None or not same_collection(collection, held):
        return EffectStatus("differs", "does not have the collection")
    match kind:
        case "create_partition":
            return _partition(change["id"], change["name"], held)
        case "drop_partition":
            return _OPEN if change["id"] in held.partitions else _DONE
        case "schema_change":
            return _schema(change["version"], CollectionSchema.from_json(change["schema"]), held)
        case _:
            return _OPEN


def _partition(number: int, name: str, held: VChannelDefinition) -> EffectStatus:
    if held.partitions.get(number) == name:
        return _DONE
    if number in held.partitions:
        return EffectStatus("differs", f"has the partition {held.partitions[number]!r} under the id {number}")
    if name in held.partitions.values():
        return EffectStatus("differs", f"has the partition {name!r} under another id than {number}")
    return _OPEN


def _schema(version: int, wanted: CollectionSchema, held: VChannelDefinition) -> EffectStatus:
    newest = len(held.schemas)
    if version == newest + 1:
        return _OPEN
    if version <= newest and held.schemas[version - 1] == wanted:
        return _DONE
    added = ", ".join(each.name for each in held.schemas[-1].fields)
    return EffectStatus("differs", f"has schema version {newest} ({added}), where version {version} should come next")


def _create(collection: CollectionInfo, vchannel: str, term: int, change: dict[str, Any]) -> MutableMessage:
    return builders.create_collection(
        collection.name,
        collection.schemas[0],
        vchannel=vchannel,
        vchannels=collection.vchannels,
        collection_id=collection.id,
        partitions=collection.partitions,
        term=term,
    )


def _changes(change: dict[str, Any]) -> list[SchemaChange]:
    if "field" in change:  # stored by an early build, which only added fields
        return [AddField(FieldSpec.from_json(change["field"]))]
    return [change_from_json(each) for each in change["changes"]]


_MESSAGES: Final[dict[str, Callable[[CollectionInfo, str, int, dict[str, Any]], MutableMessage]]] = {
    "create_collection": _create,
    "drop_collection": lambda collection, vchannel, term, change: builders.drop_collection(
        vchannel=vchannel, collection_id=collection.id, term=term
    ),
    "create_partition": lambda collection, vchannel, term, change: builders.create_partition(
        change["name"], vchannel=vchannel, collection_id=collection.id, partition_id=change["id"], term=term
    ),
    "drop_partition": lambda collection, vchannel, term, change: builders.drop_partition(
        vchannel=vchannel, collection_id=collection.id, partition_id=change["id"], term=term
    ),
    "schema_change": lambda collection, vchannel, term, change: builders.schema_change(
        _changes(change),
        vchannel=vchannel,
        collection_id=collection.id,
        schema_version=change["version"],
        term=term,
    ),
    "manual_flush": lambda collection, vchannel, term, change: builders.manual_flush(
        vchannel=vchannel, collection_id=collection.id, term=term
    ),
}
