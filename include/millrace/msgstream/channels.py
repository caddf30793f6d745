"""Channels of a deployment and their owners: the service API of chapter 4 (8.2).

A registry (millrace.msgstream.registry) lists the created channels. A channel exists if its log exists. Creation
writes the registry first and destruction writes it last, so a crash in between leaves no log without a name: describe
skips a name without a log, and repeating a destruction completes it. The newest MAX_ABSENT names without a log are
kept, because some may be about to get theirs.
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
    """The owner of a channel."""

    role: str
    address: str = ""
    description_text: str = ""


@dataclass(frozen=True, slots=True)
class CreateChannelRequest:
    """Number of channels, their owner, and attributes to store with each."""

    owner_description: OwnerDescription
    num_channels: int
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CreateChannelResponse:
    """Names of the new channels."""

    channel_names: list[str]


@dataclass(frozen=True, slots=True)
class DestroyChannelRequest:
    """Channels to destroy with all their messages."""

    channel_names: Sequence[str]


@dataclass(frozen=True, slots=True)
class DescribeChannelRequest:
    """Channels to describe; empty: all."""

    channel_names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ChannelDescription:
    """A channel, its owner and its attributes."""

    channel_name: str
    owner: OwnerDescription
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class DescribeChannelResponse:
    """One description per channel, in the requested order."""

    descriptions: list[ChannelDescription]


class MsgChannels:
    """Chapter 4's Client: the channels of one log service, which it does not close. Every call may raise the registry's
    errors.
    """

    def __init__(self, service: LogService, registry: Registry | None = None) -> None:
        """`registry`: where created channels are listed; None: in the log itself."""
        self._service = service
        self._registry = registry or LogRegistry(service)

    def create_channels(self, request: CreateChannelRequest) -> CreateChannelResponse:
        """Create channels with generated names.

        Raises InvalidArgument, LogUnavailable (some may have been created).
        """
        if not 1 <= request.num_channels <= MAX_CHANNELS:
            raise InvalidArgument(f"create 1 to {MAX_CHANNELS} channels at once, not {request.num_channels}")
        token = secrets.token_hex(6)
        names = [f"stream-{token}_{number}" for number in range(request.num_channels)]
        owner, attributes = asdict(request.owner_description), dict(request.attributes)
        if not all(isinstance(text, str) for text in (*owner.values(), *attributes, *attributes.values())):
            raise InvalidArgument("owner fields and attributes must be strings")
        self._collect()
        self._registry.add(ChannelCreation(tuple(names), owner, attributes))
        for name in names:
            self._service.create(name)
        return CreateChannelResponse(names)

    def destroy_channels(self, request: DestroyChannelRequest) -> None:
        """Destroy channels that create_channels created.

        Raises ChannelNotFound (nothing is destroyed).
        """
        known, there = self._described(), set(self._service.names())
        for name in request.channel_names:
            if name not in known:
                raise ChannelNotFound(f"{name!r} was not made by create_channels, or is destroyed already")
        for name in dict.fromkeys(request.channel_names):
            if name in there:
                self._service.drop(name)
        if request.channel_names:
            self._registry.remove(request.channel_names)

    def describe_channels(self, request: DescribeChannelRequest | None = None) -> DescribeChannelResponse:
        """Describe the requested channels (default: all, by name).

        Raises ChannelNotFound.
        """
        there = set(self._service.names())
        known = {name: each for name, each in self._described().items() if name in there}
        wanted = (request.channel_names if request is not None else ()) or sorted(known)
        for name in wanted:
            if name not in known:
                raise ChannelNotFound(f"{name!r} was not made by create_channels, or is destroyed already")
        return DescribeChannelResponse([known[name] for name in wanted])

    def trim_channels(self, channel_names: Sequence[str]) -> dict[str, int]:
        """Remove messages that every consumer group of a channel has consumed; return the bytes freed per channel.

        A channel without a group is not trimmed. Nothing else removes messages.
        Raises ChannelNotFound.
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
        """Remove names without a log, except the newest: their creation was interrupted."""
        there = set(self._service.names())
        absent = [name for each in self._registry.known() for name in each.channels if name not in there]
        if len(absent) > MAX_ABSENT:
            self._registry.remove(absent[:-MAX_ABSENT])
