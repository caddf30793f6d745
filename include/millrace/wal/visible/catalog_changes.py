"""Changes in a PChannel's catalog since a snapshot of it, which a checkpoint stores instead of the whole catalog.

Changes are cumulative, so that a reader needs the snapshot and one row of changes. They name the snapshot by tick and
digest: with another one they are not applied.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, Self

import xxhash

from millrace.base.errors import UnsupportedVersion
from millrace.wal.visible.catalog import stored_form

CHANGES_VERSIONS: Final = (3,)
"""Versions of the stored form. They follow those of a catalog, so that a build from before refuses a row of changes."""

_MARK: Final = b'{"base":'


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """A checkpoint's row with a whole catalog."""

    path: str
    """Its file, relative to the table."""
    time_tick: int
    digest: str
    size: int
    """Bytes of the catalog."""


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """Fields of VChannels that differ from a snapshot's, in the JSON of a catalog. VChannels are never removed."""

    base: tuple[int, str] = (0, "")
    """Tick and digest of the snapshot."""
    version: int = 0
    """Version of the catalog's own form."""
    vchannels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def extended(self, before: bytes, after: bytes, snapshot: CatalogSnapshot) -> Self | None:
        """Return these changes with those between two catalogs; None if they cannot be described as changes."""
        old, new = stored_form(before), stored_form(after)
        if not old["vchannels"].keys() <= new["vchannels"].keys():
            return None
        changed = dict(self.vchannels)
        for name, value in new["vchannels"].items():
            known = old["vchannels"].get(name, {})
            if value == known:
                continue
            if not known.keys() <= value.keys():
                return None
            differing = {key: each for key, each in value.items() if key not in known or known[key] != each}
            changed[name] = changed.get(name, {}) | differing
        return type(self)((snapshot.time_tick, snapshot.digest), new["version"], changed)

    def apply(self, snapshot: bytes) -> bytes:
        """Return the catalog that the changes make of the snapshot's bytes."""
        vchannels = dict(stored_form(snapshot)["vchannels"])
        for name, changed in self.vchannels.items():
            vchannels[name] = vchannels.get(name, {}) | changed
        return _json({"version": self.version, "vchannels": vchannels})

    def to_bytes(self) -> bytes:
        """Return canonical bytes."""
        body = {"base": list(self.base), "catalog_version": self.version, "vchannels": self.vchannels}
        return _json(body | {"version": CHANGES_VERSIONS[-1]})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of :meth:`to_bytes`. Raises UnsupportedVersion."""
        body = json.loads(data)
        if body["version"] not in CHANGES_VERSIONS:
            raise UnsupportedVersion(
                f"changes of a catalog of version {body['version']}: run the build that wrote them"
            )
        return cls((body["base"][0], body["base"][1]), body["catalog_version"], body["vchannels"])


def is_changes(data: bytes) -> bool:
    """Return whether a checkpoint's bytes are changes, and not a whole catalog."""
    return data.startswith(_MARK)


def catalog_digest(data: bytes) -> str:
    """Return the digest by which changes name the snapshot with these bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
