"""Authorization of appends: the types and VChannels of all messages in an append, checked before the log has them.

The check works column by column. Global admins skip it. It decodes entries exactly as the chain does
(millrace.message.wire.decode), so that an entry cannot mean one thing here and another there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.access.grants import LOCAL_ADMIN, Caller, Resource, ResourceKind, Role
from millrace.access.permissions import MESSAGE_REQUIREMENTS, channel_resources
from millrace.base.errors import Malformed, PermissionDenied
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_header_summary
from millrace.wal.entry_chunks import chunk_bounds

_KNOWN: Final = {kind.value: kind for kind in MESSAGE_REQUIREMENTS}
_REMEMBERED: Final = 4096
"""Number of (type, VChannel) pairs known to be allowed that each stream caches."""

CollectionLookup = Callable[[str], str | None]
"""Returns the name of the collection of a VChannel, or None."""


class AppendAuthorizer:
    """Authorizes the appends of one stream for its caller."""

    def __init__(self, caller: Caller, collection_of: CollectionLookup, *, principal: object = None) -> None:
        """Authorize `caller`. The deployment's own servers may name another `principal`, whose request they carry out.

        Raises PermissionDenied for any other caller that names one.
        """
        if principal is not None and (caller is not LOCAL_ADMIN or not isinstance(principal, str)):
            raise PermissionDenied("only the deployment's own servers append in the name of somebody else")
        self.principal = caller.principal.name if principal is None else str(principal)
        """Principal whose name the entries get."""
        self._caller = caller
        self._collection_of = collection_of
        self._free = caller.principal.has_role((Role.ADMIN,), ())
        self._allowed: set[tuple[int, str]] = set()

    def authorize(self, values: pa.LargeBinaryArray) -> None:
        """Authorize entries with valid framing, all or none.

        Raises PermissionDenied, Malformed, UnsupportedVersion.
        """
        self._caller.require_valid()
        if self._free:
            return
        for start, stop in chunk_bounds(values):
            heads = decode_header_summary(values.slice(start, stop - start))
            if isinstance(heads, str):
                raise Malformed(f"an entry of the append is malformed: {heads}; nothing was appended")
            pairs = np.unique(heads.types.astype(np.int64) << 32 | heads.vchannels)
            for kind, name in zip((pairs >> 32).tolist(), (pairs & 0xFFFFFFFF).tolist(), strict=True):
                self._judge(kind, heads.names[name])

    def _judge(self, number: int, vchannel: str) -> None:
        if (number, vchannel) in self._allowed:
            return
        kind = _KNOWN.get(number)
        if kind is None:
            raise PermissionDenied(f"only an admin's token may append messages of type {number}; nothing was appended")
        need = MESSAGE_REQUIREMENTS[kind]
        resources = () if need.scope is not ResourceKind.VCHANNEL else vchannel_resources(vchannel, self._collection_of)
        self._caller.principal.require_role(need.roles, resources, f"a message of type {MessageType(kind).name}")
        if len(self._allowed) >= _REMEMBERED:
            self._allowed.clear()
        self._allowed.add((number, vchannel))


def readable_rows(batch: pa.RecordBatch, caller: Caller, collection_of: CollectionLookup) -> pa.RecordBatch:
    """Filter rows of a PChannel's tail: keep time ticks, and VChannels that the caller may read."""
    names = pc.unique(batch.column("vchannel").cast(pa.string())).to_pylist()
    own = [
        name
        for name in names
        if name and caller.principal.has_role((Role.READ,), vchannel_resources(name, collection_of))
    ]
    readable = pc.is_in(batch.column("vchannel").cast(pa.string()), value_set=pa.array(own, pa.string()))
    ticks = pc.equal(batch.column("type").cast(pa.string()), MessageType.TIME_TICK.name)
    return batch.filter(pc.or_(readable, ticks))


def vchannel_resources(vchannel: str, collection_of: CollectionLookup) -> tuple[Resource, ...]:
    """Return a VChannel with its PChannel and, if it has one, its collection."""
    name = collection_of(vchannel)
    return channel_resources(vchannel) + (() if name is None else (Resource(ResourceKind.COLLECTION, name),))
