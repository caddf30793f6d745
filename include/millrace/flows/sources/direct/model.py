"""The declaration of a socket whose messages are read as they arrive."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, StringConstraints, model_validator

from millrace.flows.declare.addresses import address_of, check_address, host_of
from millrace.flows.declare.part import Part, words
from millrace.flows.kinds import SourceKind

MAX_DATAGRAM: Final = 65_535
"""Bytes of the largest UDP datagram."""
Prefix: TypeAlias = Annotated[str, StringConstraints(max_length=255)]


class SequenceNumbers(Part):
    """The number in a message, which increases by 1 from one message of a sender to the next."""

    field: str = words("name of the field of a JSON message; empty: the number is in its bytes", default="",
                       max_length=255)  # fmt: skip
    offset: int = words("index of its first byte", default=0, ge=0, le=MAX_DATAGRAM)
    width: Literal[1, 2, 4, 8] = words("its bytes, unsigned; it wraps to 0", default=4)
    order: Literal["big", "little"] = words("order of its bytes", default="big")


class DirectSource(Part):
    """Messages of a UDP or ZeroMQ socket, at most once. One task."""

    kind: Literal["direct"] = "direct"
    transport: Literal["udp", "zeromq"] = words("", default="udp")
    address: str = words(
        "host:port of this host to listen on (UDP: or a multicast group to join); for ZeroMQ with `connect`, of the"
        " sender", max_length=300,
    )  # fmt: skip
    interface: str = words(
        "UDP: address of the network interface on which a group is joined; empty: the system's choice", default="",
        max_length=45,
    )  # fmt: skip
    socket: Literal["sub", "pull"] = words("ZeroMQ: the kind of socket", default="sub")
    connect: bool = words("ZeroMQ: connect to the address, or else listen on it", default=True)
    subscriptions: Annotated[tuple[Prefix, ...], Field(max_length=100)] = words(
        "ZeroMQ: prefixes of the topics that `sub` reads; the default is all", default=("",)
    )
    format: Literal["json", "bytes"] = words(
        "the form of a message; bytes: a field `payload` in base64", default="json"
    )
    sequence: SequenceNumbers | None = words("the number in each message, to count lost ones", default=None)
    max_bytes: int = words(
        "longest message: a longer datagram is cut and put aside, a ZeroMQ peer that sends one is disconnected",
        default=MAX_DATAGRAM, ge=1, le=16 << 20,
    )  # fmt: skip
    buffer_messages: int = words("messages in memory; further ones are dropped and counted", default=100_000, ge=1,
                                 le=10_000_000)  # fmt: skip
    buffer_mib: int = words("the most MiB of these messages", default=64, ge=1, le=4096)
    spool_mib: int = words("MiB on the disk that wait for the flow; then messages stay in memory", default=1024,
                           ge=1, le=1 << 20)  # fmt: skip
    start: Literal["earliest", "latest"] = words("the start of a new flow in the spool", default="earliest")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        try:
            check_address(self.address)
        except ValueError as error:
            raise ValueError(f"address: {error}") from None
        if ":" not in self.address.rpartition("]")[2]:
            raise ValueError("address: add a port")
        if self.interface:
            try:
                ipaddress.ip_address(self.interface)
            except ValueError:
                raise ValueError("interface: give the IP address of a network interface") from None
        udp = self.transport == "udp"
        if udp and address_of(self.host) is None:
            raise ValueError("address: UDP needs an IP address")
        if udp and self.max_bytes > MAX_DATAGRAM:
            raise ValueError(f"max_bytes: a UDP datagram has at most {MAX_DATAGRAM} bytes")
        if not udp and self.interface:
            raise ValueError("interface: only for UDP")
        if not udp and self.is_multicast:
            raise ValueError("address: ZeroMQ multicast is not supported")
        if self.sequence is not None and self.sequence.field and self.format != "json":
            raise ValueError("sequence.field: messages of the format bytes have no fields")
        return self

    @property
    def host(self) -> str:
        """The host of the address."""
        return host_of(self.address)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_multicast(self) -> bool:
        found = address_of(self.host)
        return found is not None and found.is_multicast

    def addresses(self) -> Iterator[tuple[str, str]]:
        yield "address", self.host
        if self.interface:
            yield "interface", self.interface

    @property
    def names(self) -> tuple[str, ...]:
        """The topic of its lane."""
        return (f"{self.transport}-{self.host.replace(':', '.')}-{self.port}",)

    @property
    def name(self) -> str:
        """Its name in lists and graphs."""
        return f"{self.transport}://{self.address}"

    @property
    def words(self) -> str:
        """Its transport and address, for messages."""
        return f"{self.transport} at {self.address}"


KIND: Final = SourceKind(
    "direct",
    DirectSource,
    "millrace.flows.sources.direct.receiving:source_of",
    "millrace.flows.sources.direct.receiving:reader_of",
    ordered_by_key=False,
    repeatable=False,
    feeder="millrace.flows.sources.direct.receiving:feeder_of",
)
