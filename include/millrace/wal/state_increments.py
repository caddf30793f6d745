"""Increments between two channel states: what a commit stores of a state instead of all of it.

An increment has the parts of the state that are not VChannels, and of each VChannel that changed the fields, segments,
transactions, producers and partitions that changed. The states share what did not change, so making one costs what
changed. Applied to its base it gives the later state exactly; applied to another state it gives nonsense, so stored
increments name their bases (millrace.tables.wal.state_rows).
"""

from __future__ import annotations

import json
from typing import Any, Final

from millrace.base.errors import Malformed, UnsupportedVersion
from millrace.wal.shared_map import SharedMap
from millrace.wal.state import DECODE_ERRORS, FIELD_FORMS, MAP_FORMS, ChannelState, VChannelState, state_head
from millrace.wal.versions import CHAIN_VERSIONS

INCREMENT_VERSIONS: Final = (1,)
"""Versions of the serialised form."""
_MARK: Final = 0xE0
"""An increment begins with this plus its version; a state with its chain version, which is less."""

_IDENTITY: Final = ("collection_id", "collection_name", "number", "vchannels", "schemas")
"""Fields that seldom change: a VChannel that differs in them is stored whole."""


def is_increment(data: bytes) -> bool:
    """Return whether a state row's bytes are an increment, of any version, and not a whole state."""
    return data[:1] >= bytes([_MARK])


def make_increment(base: ChannelState, state: ChannelState) -> bytes:
    """Return canonical bytes of what changed from `base` to `state`, two states of one PChannel."""
    head = state_head(state)
    if state.config == base.config:
        del head["config"]
    channels: dict[str, Any] = {}
    for name in state.vchannels.changed_keys(base.vchannels):
        old, new = base.vchannels.get(name), state.vchannels.get(name)
        # Equal ones are other objects if the states were made of different bytes.
        if old != new:
            channels[name] = None if new is None else _changes(old, new)
    data = head | {"version": state.chain_version, "changed": channels}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return bytes([_MARK + INCREMENT_VERSIONS[-1]]) + text


def _changes(old: VChannelState | None, new: VChannelState) -> dict[str, Any]:
    if old is None or any(getattr(old, name) != getattr(new, name) for name in _IDENTITY):
        return {"whole": new.to_json()}
    changes: dict[str, Any] = {}
    for name, (to_json, _) in FIELD_FORMS.items():
        if (value := getattr(new, name)) != getattr(old, name):
            changes[name] = to_json(value)
    for name, (entry_to_json, _) in MAP_FORMS.items():
        before, after = getattr(old, name), getattr(new, name)
        keys = after.changed_keys(before) if after is not before else ()
        if put := [entry_to_json(key, after[key]) for key in keys if key in after and before.get(key) != after[key]]:
            changes[name] = put
        if gone := [key for key in keys if key not in after]:
            changes[f"no_{name}"] = gone
    return changes


def apply_increment(base: ChannelState, data: bytes) -> ChannelState:
    """Return the state that `data` makes of `base`, which does not change. Raises UnsupportedVersion, Malformed."""
    if not data or data[0] - _MARK not in INCREMENT_VERSIONS:
        found = data[0] - _MARK if data else None
        raise UnsupportedVersion(
            f"an increment of the channel state of version {found}: this build reads versions {INCREMENT_VERSIONS}"
        )
    try:
        item = json.loads(data[1:])
        version = item["version"]
        if version in CHAIN_VERSIONS:
            channels = base.vchannels
            for name, changes in item["changed"].items():
                channels = (
                    channels.without(name) if changes is None else channels.set(name, _changed(base, name, changes))
                )
            return ChannelState.of_head(item, version, channels, None if "config" in item else base.config)
    except DECODE_ERRORS as error:
        raise Malformed(f"cannot apply an increment of the channel state: {error}") from error
    raise UnsupportedVersion(f"an increment of chain version {version}: this build reads versions {CHAIN_VERSIONS}")


def _changed(base: ChannelState, name: str, changes: dict[str, Any]) -> VChannelState:
    if "whole" in changes:
        return VChannelState.from_json(changes["whole"])
    channel = base.vchannels[name]
    values: dict[str, Any] = {
        field: from_json(changes[field]) for field, (_, from_json) in FIELD_FORMS.items() if field in changes
    }
    for field, (_, entry_from_json) in MAP_FORMS.items():
        entries: SharedMap[Any, Any] = getattr(channel, field)
        for key in changes.get(f"no_{field}", ()):
            entries = entries.without(key)
        for entry in changes.get(field, ()):
            entries = entries.set(*entry_from_json(entry))
        if entries is not getattr(channel, field):
            values[field] = entries
    return channel._replace(**values)
