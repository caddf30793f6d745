"""Topics of a deployment: a PChannel of any name is one topic ``<prefix>.<encoded name>`` in the deployment's namespace.

Letters, digits, ``_`` and ``-`` stand as they are, every other byte of the name's UTF-8 as ``.XX``. A name that ends as the
topic of a partition does (``...-partition-3``) would be taken for one, so its last hyphen is escaped as well.
"""

from __future__ import annotations

import re
from typing import Final

_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_PARTITION: Final = re.compile(r"-(?=partition-\d+$)|-(?=\d+$)")
_ESCAPED: Final = re.compile(r"\.([0-9A-F]{2})")


def topic_of(prefix: str, pchannel: str) -> str:
    """The topic (without tenant and namespace) of a PChannel."""
    encoded = "".join(chr(byte) if byte in _PLAIN else f".{byte:02X}" for byte in pchannel.encode())
    if re.search(r"-partition-\d+$", encoded):
        encoded = _PARTITION.sub(".2D", encoded)
    return f"{prefix}.{encoded}"


def pchannel_of_topic(prefix: str, topic: str) -> str | None:
    """The PChannel of a topic; None where the topic is not one of this deployment's."""
    start = f"{prefix}."
    if not topic.startswith(start):
        return None
    encoded = topic[len(start) :]
    try:
        data = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), encoded).encode("latin-1")
        name = data.decode()
    except UnicodeError:
        return None
    return name if topic_of(prefix, name) == topic else None


def groups_topic(prefix: str) -> str:
    """The topic whose properties list the deployment's consumer groups; never a PChannel's: a prefix starts with no ``_``."""
    return f"_groups.{prefix}"
