"""Addresses that no pipeline may reach: link-local ones, where the keys lie that a cloud hands out (169.254.169.254), multicast and 0.0.0.0."""

from __future__ import annotations

import ipaddress
import socket


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, one of IPv4 where it is mapped into IPv6; None where it is a name."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_forbidden(host: str) -> bool:
    """Whether `host` is such an address. A name is none: who connects by it looks at the address that it led to."""
    found = address_of(host)
    return found is not None and (found.is_link_local or found.is_multicast or found.is_unspecified)


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
