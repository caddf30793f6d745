"""Settings of message streams, validated before use; ``MsgStreamFactory.set_params`` takes them by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

from millrace.base.errors import InvalidSettings


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Sizes in bytes of log entries, times in seconds."""

    timeout: float = 30.0
    """Default timeout of produce and consume."""
    read_bytes: int = 4 << 20
    """Bytes read from a channel at once: what a consumer buffers per channel beyond its packs."""
    max_pack_bytes: int = 256 << 20
    """Bytes that a time-tick stream buffers over all channels until their ticks have come; more raises PackTooLarge."""
    auto_ack: bool = True
    """Whether consume acknowledges the previous pack."""
    group_lease: float = 5.0
    """How long a consumer that was killed keeps its group's channels from the next one; 0: several consumers of a group
    are not refused, and each gets every message."""
    on_refused: Literal["attach", "raise"] = "attach"
    """Handling of late and malformed messages: attach them to the pack's ``refused``, or raise MessagesRefused with the
    pack.
    """

    def __post_init__(self) -> None:
        for name, least in (("timeout", 0.0), ("read_bytes", 1), ("max_pack_bytes", 1), ("group_lease", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise InvalidSettings(f"{name} is a number of at least {least}, not {value!r}")
        if not isinstance(self.auto_ack, bool):
            raise InvalidSettings(f"auto_ack is True or False, not {self.auto_ack!r}")
        if self.on_refused not in ("attach", "raise"):
            raise InvalidSettings(f"on_refused is 'attach' or 'raise', not {self.on_refused!r}")

    def with_(self, params: Mapping[str, object]) -> Self:
        """Return a copy with `params`.

        Raises InvalidSettings for unknown names and invalid values.
        """
        known = {field.name for field in fields(self)}
        unknown = sorted(set(params) - known)
        if unknown:
            raise InvalidSettings(f"unknown setting {unknown[0]!r} of a stream; known are {', '.join(sorted(known))}")
        return replace(self, **params)  # type: ignore[arg-type]
