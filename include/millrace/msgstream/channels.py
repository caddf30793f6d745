"""Channels of a deployment, with owners: the service API of chapter 4 (8.2).

What was created and destroyed stands as events in a log of its own, ``_channels``, beside the channels: it is as durable as they
are, works on any backend, and any number of processes may write it at once. A channel is there when its log is. Creating writes
the event first and destroying writes it last, so that a crash in between leaves no channel that nobody can name: describe passes
over a name without a log, and destroying again completes what was begun.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from millrace.base.errors import ChannelExists, ChannelNotFound, InvalidArgument, Malformed, UnsupportedVersion
from millrace.log.protocol import Log, LogService

REGISTRY: Final = "_channels"
MAX_CHANNELS: Final = 1024
MAX_EVENT_BYTES: Final = 256 << 10

_VERSION: Final = 1


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
    """Chapter 4's Client: the channels of one log service, which it leaves open."""

    def __init__(self, service: LogService) -> None:
        self._service = service

    def create_channels(self, request: CreateChannelRequest) -> CreateChannelResponse:
        """Make channels with names of their own. Raises InvalidArgument; LogUnavailable (some may have been made)."""
        if not 1 <= request.num_channels <= MAX_CHANNELS:
            raise InvalidArgument(f"create 1 to {MAX_CHANNELS} channels at once, not {request.num_channels}")
        token = secrets.token_hex(6)
        names = [f"stream-{token}_{number}" for number in range(request.num_channels)]
        owner, attributes = asdict(request.owner_description), dict(request.attributes)
        if not all(isinstance(text, str) for text in (*owner.values(), *attributes, *attributes.values())):
            raise InvalidArgument("an owner's parts and attributes are strings")
        self._write({"op": "create", "channels": names, "owner": owner, "attributes": attributes})
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
            self._write({"op": "destroy", "channels": list(request.channel_names)})

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

    def _write(self, event: dict[str, Any]) -> None:
        try:
            data = json.dumps({"version": _VERSION, **event}, sort_keys=True).encode()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a channel's description is text ({error})") from None
        if len(data) > MAX_EVENT_BYTES:
            raise InvalidArgument(
                f"a description has at most {MAX_EVENT_BYTES} bytes, not {len(data)}: shorten its texts"
            )
        log = self._registry(make=True)
        assert log is not None
        try:
            log.append([data])
        finally:
            log.close()

    def _registry(self, *, make: bool) -> Log | None:
        if REGISTRY not in self._service.names():
            if not make:
                return None
            try:
                self._service.create(REGISTRY)
            except ChannelExists:
                pass  # another process made it in this moment
        return self._service.open(REGISTRY)

    def _described(self) -> dict[str, ChannelDescription]:
        log = self._registry(make=False)
        if log is None:
            return {}
        found: dict[str, ChannelDescription] = {}
        try:
            position = log.describe().begin
            while (run := log.read(position)).batch.num_rows:
                for value in run.batch.column("value").to_pylist():
                    _apply(found, value)
                position = run.next
        finally:
            log.close()
        return found


def _apply(found: dict[str, ChannelDescription], value: bytes) -> None:
    try:
        event = json.loads(value)
    except (ValueError, RecursionError):
        event = None
    match event:
        case {"version": int(version)} if version != _VERSION:
            raise UnsupportedVersion(
                f"the log {REGISTRY} has an event of version {version}; this build knows {_VERSION}"
            )
        case {
            "op": "create",
            "channels": [*names],
            "owner": {"role": str(role), "address": str(address), "description_text": str(text)},
            "attributes": dict(attributes),
        }:
            owner = OwnerDescription(role, address, text)
            found.update({str(name): ChannelDescription(str(name), owner, dict(attributes)) for name in names})
        case {"op": "destroy", "channels": [*names]}:
            for name in names:
                found.pop(str(name), None)
        case _:
            raise Malformed(f"the log {REGISTRY} has an entry that is no event of a channel: {value[:80]!r}")
