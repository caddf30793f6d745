"""The collections in the chain's state of one PChannel, which the coordinator's catalog follows.

Plain values with a JSON form for the wire. They describe no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

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


class OpenFigures(NamedTuple):
    """The amount of open work of a PChannel, for views."""

    vchannels: int
    transactions: int
    growing_rows: int
    growing_bytes: int

    @classmethod
    def of(cls, state: ChannelState) -> Self:
        """Count. Reads the VChannels with growing segments alone."""
        open_channels = state.channels_with(lambda work: work.growing > 0)
        growing = [segment for channel in open_channels for segment in channel.growing.values()]
        return cls(
            len(state.vchannels),
            state.open_work.open_txns,
            sum(each.rows for each in growing),
            sum(each.bytes for each in growing),
        )


class VChannelOutline(NamedTuple):
    """A key that changes with a VChannel's definition: schema versions are only ever added."""

    collection_id: int
    schema_version: int
    partitions: dict[int, str]


@dataclass(frozen=True, slots=True)
class PChannelDefinitions:
    """The VChannels of a PChannel: their number, the limits, and the requested definitions by name."""

    vchannel_count: int
    max_vchannels: int
    max_partitions: int
    collections: dict[int, str]
    """Every collection with a VChannel here, its name by its id; empty if one collection was requested."""
    vchannels: dict[str, VChannelDefinition]
    outlines: dict[str, VChannelOutline] | None = None
    """Every VChannel by name; None if one collection was requested, or from a server of an earlier build."""

    @classmethod
    def of(cls, state: ChannelState, collection_id: int | None) -> Self:
        """Describe `state`: the definitions of one collection, or an outline of all collections."""
        limits = len(state.vchannels), state.config.max_vchannels, state.config.max_partitions
        if collection_id is not None:
            own = state.channels_of(collection_id)
            return cls(*limits, {}, {name: VChannelDefinition.of(each) for name, each in own})
        channels = state.vchannels.values()
        outlines = {
            each.name: VChannelOutline(each.collection_id, len(each.schemas), dict(each.partitions))
            for each in channels
        }
        return cls(*limits, {each.collection_id: each.collection_name for each in channels}, {}, outlines)

    def to_json(self) -> dict[str, Any]:
        return {
            "taken": self.vchannel_count,
            "max_vchannels": self.max_vchannels,
            "max_partitions": self.max_partitions,
            "collections": {str(number): name for number, name in self.collections.items()},
            "vchannels": {name: each.to_json() for name, each in self.vchannels.items()},
            "outlines": None if self.outlines is None else {name: list(each) for name, each in self.outlines.items()},
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
            None if (outlines := value.get("outlines")) is None else {str(k): _outline(v) for k, v in outlines.items()},
        )


def _outline(value: Sequence[Any]) -> VChannelOutline:
    collection_id, version, partitions = value
    return VChannelOutline(collection_id, version, {int(number): str(name) for number, name in partitions.items()})
