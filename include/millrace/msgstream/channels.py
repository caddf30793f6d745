"""Channels of a deployment, with owners: the service API of chapter 4 (8.2).

What was created stands in a registry (millrace.msgstream.registry). A channel is there when its log is. Creating writes the registry
first and destroying writes it last, so that a crash in between leaves no channel that nobody can name: describe passes
over a name without a log, and destroying again completes what was begun. Of names without a log the newest MAX_ABSENT are kept: some of
them may be just about to get theirs.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from millrace.base.errors import ChannelNotFound, InvalidArgument
from millrace.log.protocol import LogService
from millrace.msgstream.registry import ChannelCreation, LogRegistry, Registry

MAX_CHANNELS: Final = 1024
MAX_ABSENT: Final = 4 * MAX_CHANNELS


@dataclass(frozen=True, slots=True)
class OwnerDescription:
    """Who a channel is for."""

    role: str
    address: str = ""
    description_text: str = ""


@dataclass(frozen=True, slots=True)
class CreateChannelRequest:
    """How many channels, whose, and what else to keep with each."""

    owner_description: OwnerDescription
    num_channels: int
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CreateChannelResponse:
    """The names of the new channels."""

    channel_names: list[str]


@dataclass(frozen=True, slots=True)
class DestroyChannelRequest:
    """Channels to destroy, with all their messages."""

    channel_names: Sequence[str]


@dataclass(frozen=True, slots=True)
class DescribeChannelRequest:
    """Channels to describe; none: all."""

    channel_names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ChannelDescription:
    """A channel, its owner and its attributes."""

    channel_name: str
    owner: OwnerDescription
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class DescribeChannelResponse:
    """One description a channel, in the order that was asked for."""

    descriptions: list[ChannelDescription]


class MsgChannels:
    """Chapter 4's Client: the channels of one log service, which it leaves open. Each call raises what the registry does as well."""

    def __init__(self, service: LogService, registry: Registry | None = None) -> None:
        """`registry`: where it is kept which there are; None: in the log itself."""
        self._service = service
        self._registry = registry or LogRegistry(service)

    def create_channels(self, request: CreateChannelRequest) -> CreateChannelResponse:
        """Make channels with names of their own. Raises InvalidArgument; LogUnavailable (some may have been made)."""
        if not 1 <= request.num_channels <= MAX_CHANNELS:
            raise InvalidArgument(f"create 1 to {MAX_CHANNELS} channels at once, not {request.num_channels}")
        token = secrets.token_hex(6)
        names = [f"stream-{token}_{number}" for number in range(request.num_channels)]
        owner, attributes = asdict(request.owner_description), dict(request.attributes)
        if not all(isinstance(text, str) for text in (*owner.values(), *attributes, *attributes.values())):
            raise InvalidArgument("an owner's parts and attributes are strings")
        self._collect()
        self._registry.add(ChannelCreation(tuple(names), owner, attributes))
        for name in names:
            self._service.create(name)
        return CreateChannelResponse(names)

    def destroy_channels(self, request: DestroyChannelRequest) -> None:
        """Destroy channels that create_channels made. Raises ChannelNotFound (nothing is destroyed)."""
        known, there = self._described(), set(self._service.names())
        for name in request.channel_names:
            if name not in known:
                raise ChannelNotFound(f"{name!r} is no channel that create_channels made, or is destroyed already")
        for name in dict.fromkeys(request.channel_names):
            if name in there:
                self._service.drop(name)
        if request.channel_names:
            self._registry.remove(request.channel_names)

    def describe_channels(self, request: DescribeChannelRequest | None = None) -> DescribeChannelResponse:
        """The channels asked for (default: all, by name). Raises ChannelNotFound."""
        there = set(self._service.names())
        known = {name: each for name, each in self._described().items() if name in there}
        wanted = (request.channel_names if request is not None else ()) or sorted(known)
        for name in wanted:
            if name not in known:
                raise ChannelNotFound(f"{name!r} is no channel that create_channels made, or is destroyed already")
        return DescribeChannelResponse([known[name] for name in wanted])

    def trim_channels(self, channel_names: Sequence[str]) -> dict[str, int]:
        """Give up what every consumer group of a channel is done with; bytes freed a channel. Nothing where it has no group.

        Nothing else removes messages. Raises ChannelNotFound.
        """
        groups = self._service.groups()
        freed: dict[str, int] = {}
        for name in channel_names:
            found = [self._service.group_position(group, name) for group in groups]
            positions = [position for position in found if position is not None]
            if not positions:
                freed[name] = 0
                continue
            log = self._service.open(name)
            try:
                freed[name] = log.truncate(min(positions))
            finally:
                log.close()
        return freed

    def _described(self) -> dict[str, ChannelDescription]:
        return {
            name: ChannelDescription(name, OwnerDescription(**each.owner), dict(each.attributes))
            for each in self._registry.known()
            for name in each.channels
        }

    def _collect(self) -> None:
        """Forget names without a log, but for the newest: of creations that broke off."""
        there = set(self._service.names())
        absent = [name for each in self._registry.known() for name in each.channels if name not in there]
        if len(absent) > MAX_ABSENT:
            self._registry.remove(absent[:-MAX_ABSENT])
