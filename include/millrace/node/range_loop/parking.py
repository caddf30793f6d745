"""Parked PChannels: one small file each, written by the node, removed by a person.

A PChannel is parked at an entry that cannot be processed: everything before it is committed, nothing behind it is
touched, and the other PChannels go on. ``<folder>/<pchannel>.json`` says why. :func:`unpark` lets the next micro-batch try
again, and it parks again where the cause is still there. Deleting the whole folder does no harm.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from millrace.base.errors import ChannelNotFound, ChannelParked, Malformed
from millrace.base.files import replace_json, sync
from millrace.message.ids import EARLIEST, LogId
from millrace.node.range_loop.failure import RangeFailure


@dataclass(frozen=True, slots=True)
class Parked:
    """Why and where a PChannel stands still."""

    pchannel: str
    code: str
    """Of the error: see millrace.base.errors, or the name of an exception of Python's."""
    message: str
    position: LogId
    """The entry that cannot be processed."""
    since: str
    """UTC, ISO 8601."""

    @classmethod
    def of(cls, pchannel: str, failure: RangeFailure) -> Self:
        """`failure`, as of now."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(pchannel, failure.code, failure.message, failure.position, now)

    def error(self) -> ChannelParked:
        """This as the error that a caller who needs the PChannel gets."""
        return ChannelParked(
            f"{self.pchannel} is parked at entry {self.position} since {self.since}: {self.code}: {self.message}. "
            f"Mend the cause, then run `millrace unpark {self.pchannel}`; where that is the entry itself, and no build can "
            f"judge it: `millrace log tombstone {self.pchannel} {self.position}`."
        )


def park(folder: Path, parked: Parked) -> None:
    """Park a PChannel, durably. Parking it again replaces what was said before."""
    replace_json(folder / f"{parked.pchannel}.json", asdict(parked), synced=True)


def unpark(folder: Path, pchannel: str) -> None:
    """Let a parked PChannel go on. Raises ChannelNotFound where it is not parked."""
    if pchannel not in parked_names(folder):  # a name with a / in it, say, would lead elsewhere
        raise ChannelNotFound(f"{pchannel} is not parked")
    try:
        (folder / f"{pchannel}.json").unlink()
    except FileNotFoundError:
        raise ChannelNotFound(f"{pchannel} is not parked") from None
    sync(folder)


def parked_names(folder: Path) -> frozenset[str]:
    """The PChannels that are parked; one listing, cheap enough for each poll."""
    try:
        return frozenset(name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return frozenset()


def read_parked(folder: Path) -> list[Parked]:
    """What is parked and why, sorted by PChannel. The file's name parks it, whatever became of its words."""
    found = []
    for name in sorted(parked_names(folder)):
        path = folder / f"{name}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found.append(Parked(**{**data, "position": LogId(*data["position"])}))
        except FileNotFoundError:  # unparked meanwhile
            continue
        except (ValueError, KeyError, TypeError) as error:
            words = f"the file {path}, which would say why, does not read ({error})"
            found.append(Parked(name, Malformed.code, words, EARLIEST, ""))
    return found
