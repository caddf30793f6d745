"""The collections in the chain's state of one PChannel, which the coordinator's catalog follows.

Plain values with a JSON form for the wire. They describe no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from millrace.message.schema import CollectionSchema

if TYPE_CHECKING:  # clients that read definitions do not have the chain's state
    from millrace.wal.state import ChannelState, VChannelState


@dataclass(frozen=True, slots=True)
class VChannelDefinition:
    """The collection of one VChannel, as the chain has it."""

    collection_id: int
    name: str
    vchannels: tuple[str, ...]
    schemas: tuple[CollectionSchema, ...]
    """Version v is schemas[v - 1]."""
    partitions: dict[int, str]

    @classmethod
    def of(cls, channel: VChannelState) -> Self:
        return cls(
            channel.collection_id,
            channel.collection_name,
            channel.vchannels,
            channel.schemas,
            dict(channel.partitions),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "collection_id": self.collection_id,
            "name": self.name,
            "vchannels": list(self.vchannels),
            "schemas": [schema.to_json() for schema in self.schemas],
            "partitions": {str(number): name for number, name in sorted(self.partitions.items())},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            int(value["collection_id"]),
            str(value["name"]),
            tuple(value["vchannels"]),
            tuple(CollectionSchema.from_json(schema) for schema in value["schemas"]),
            {int(number): str(name) for number, name in value["partitions"].items()},
        )


@dataclass(frozen=True, slots=True)
class PChannelDefinitions:
    """The VChannels of a PChannel: their number, the limits, and the requested definitions by name."""

    vchannel_count: int
    max_vchannels: int
    max_partitions: int
    collections: dict[int, str]
    """Every collection with a VChannel here: its name by its id."""
    vchannels: dict[str, VChannelDefinition]

    @classmethod
    def of(cls, state: ChannelState, collection_id: int | None) -> Self:
        """Describe `state`, with the definitions of one collection, or of none."""
        channels = state.vchannels.values()
        return cls(
            len(state.vchannels),
            state.config.max_vchannels,
            state.config.max_partitions,
            {each.collection_id: each.collection_name for each in channels},
            {each.name: VChannelDefinition.of(each) for each in channels if each.collection_id == collection_id},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "taken": self.vchannel_count,
            "max_vchannels": self.max_vchannels,
            "max_partitions": self.max_partitions,
            "collections": {str(number): name for number, name in self.collections.items()},
            "vchannels": {name: each.to_json() for name, each in self.vchannels.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`to_json`."""
        return cls(
            int(value["taken"]),
            int(value["max_vchannels"]),
            int(value["max_partitions"]),
            {int(number): str(name) for number, name in value["collections"].items()},
            {str(name): VChannelDefinition.from_json(each) for name, each in value["vchannels"].items()},
        )
