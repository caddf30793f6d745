"""Addresses that no pipeline may reach: where the keys lie that a cloud hands out (link-local ones such as 169.254.169.254, and those few of
its that are not), multicast and 0.0.0.0."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

_KEYS: Final = frozenset(
    ipaddress.ip_address(address)
    for address in (
        "fd00:ec2::254",  # Amazon
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "192.0.0.192",  # Oracle
    )
)
"""Of clouds' metadata that are not link-local."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, one of IPv4 where it leads there through IPv6 (mapped, 6to4, NAT64); None where it is a name."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    inner = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF) if found in _NAT64 else None
    return found.ipv4_mapped or found.sixtofour or inner or found


def is_forbidden(host: str) -> bool:
    """Whether `host` is such an address. A name is none: who connects by it looks at the address that it led to."""
    found = address_of(host)
    return found is not None and (found.is_link_local or found.is_multicast or found.is_unspecified or found in _KEYS)


def leads_astray(host: str) -> bool:
    """Whether `host` is such an address, or a name that leads to one now. Asks the resolver; who connects says what it does not know."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(is_forbidden(str(each[4][0])) for each in found)


def host_of(address: str) -> str:
    """Of ``host:port``, ``[host]:port`` or a host alone."""
    address = address.rstrip("/")
    host = address[1:].partition("]")[0] if address.startswith("[") else address.rpartition(":")[0] or address
    return host.lower()
