"""Addresses that no pipeline may reach: metadata services of clouds, multicast and 0.0.0.0.

Metadata services hand out keys. Most have a link-local address such as 169.254.169.254; the few others are listed here.
"""

from __future__ import annotations

import ipaddress
import re
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
"""Addresses of cloud metadata services that are not link-local."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::([0-9]{1,5}))?", re.ASCII)
_MAX_NAME: Final = 253
_MAX_LABEL: Final = 63


def check_address(address: str) -> None:
    """Check that `address` is ``host`` or ``host:port``, where the host may be an IPv6 address in brackets.

    Raises ValueError that describes the problem.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(
            "is not host:port: a name of letters, digits, dots and hyphens, or an IPv6 address in brackets"
        )
    inner, name, port = found.groups()
    if port is not None and not 1 <= int(port) <= 65535:
        raise ValueError(f"has the port {port}; a port is 1 to 65535")
    if inner is not None:
        try:
            ipaddress.IPv6Address(inner)
        except ValueError:
            raise ValueError(f"has [{inner}], which is not an IPv6 address") from None
    elif len(name) > _MAX_NAME or not all(0 < len(each) <= _MAX_LABEL for each in name.removesuffix(".").split(".")):
        raise ValueError(
            f"has a name that cannot be resolved: at most {_MAX_NAME} characters, 1 to {_MAX_LABEL} between dots"
        )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return `host` as an address, or None if it is a name. IPv4 inside IPv6 (mapped, 6to4, NAT64) is extracted."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    inner = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF) if found in _NAT64 else None
    return found.ipv4_mapped or found.sixtofour or inner or found


def is_forbidden(host: str) -> bool:
    """Return whether `host` is a forbidden address. False for a name: check the address that it resolves to."""
    found = address_of(host)
    return found is not None and (found.is_link_local or found.is_multicast or found.is_unspecified or found in _KEYS)


def leads_astray(host: str) -> bool:
    """Return whether `host` is a forbidden address, or a name that resolves to one now.

    Asks the resolver. An unresolvable name fails when something connects to it.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(is_forbidden(str(each[4][0])) for each in found)


def host_of(address: str) -> str:
    """Return the host of ``host:port``, ``[host]:port`` or a host alone, in lower case."""
    address = address.rstrip("/")
    host = address[1:].partition("]")[0] if address.startswith("[") else address.rpartition(":")[0] or address
    return host.lower()
