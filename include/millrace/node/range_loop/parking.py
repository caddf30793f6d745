"""Parked PChannels: one small file each, written by the node and removed by a person.

A PChannel is parked at an entry that cannot be processed. Everything before the entry is committed, nothing after it is
read, and the other PChannels go on. ``<folder>/<pchannel>.json`` holds the reason. After :func:`unpark` the next
micro-batch tries again, and parks the PChannel again if the cause is still there. The folder may be deleted safely.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from millrace.base.deadline import Deadline
from millrace.base.errors import ChannelNotFound, ChannelParked, Malformed
from millrace.base.files import replace_json, sync
from millrace.message.ids import EARLIEST, LogId
from millrace.node.range_loop.failure import RangeFailure
from millrace.rpc import calls

if TYPE_CHECKING:
    from millrace.client.append_client import AppendClient


@dataclass(frozen=True, slots=True)
class Parked:
    """The place and the reason of a parked PChannel."""

    pchannel: str
    code: str
    """Code of the error (millrace.base.errors), or the name of a Python exception."""
    message: str
    position: LogId
    """The entry that cannot be processed."""
    since: str
    """UTC, ISO 8601."""

    @classmethod
    def of(cls, pchannel: str, failure: RangeFailure) -> Self:
        """Describe `failure` as of now."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(pchannel, failure.code, failure.message, failure.position, now)

    def error(self) -> ChannelParked:
        """Return the error for a caller that needs the PChannel."""
        return ChannelParked(
            f"{self.pchannel} is parked at entry {self.position} since {self.since}: {self.code}: {self.message}. "
            f"Fix the cause, then run `millrace unpark {self.pchannel}`. If no build can process the entry itself, run "
            f"`millrace log tombstone {self.pchannel} {self.position}`."
        )


def park(folder: Path, parked: Parked) -> None:
    """Park a PChannel durably. Parking it again replaces the reason."""
    replace_json(folder / f"{parked.pchannel}.json", asdict(parked), synced=True)


def unpark(folder: Path, pchannel: str) -> None:
    """Let a parked PChannel go on. Raises ChannelNotFound if it is not parked."""
    if pchannel not in parked_names(folder):  # also rejects a name that contains a path separator
        raise ChannelNotFound(f"{pchannel} is not parked")
    try:
        (folder / f"{pchannel}.json").unlink()
    except FileNotFoundError:
        raise ChannelNotFound(f"{pchannel} is not parked") from None
    sync(folder)


def restart_follower(client: AppendClient, pchannel: str) -> None:
    """Restart a PChannel's follower once the cause of its parking is fixed.

    This restarts the follower on the append host, and on the node that owns the PChannel.
    """
    from millrace.client.produce.lane import deliver_single  # not needed by the loops, which load this module

    request, seconds = {"pchannel": pchannel}, client.service.deadline
    client.call(calls.RESTART, request, seconds=seconds)
    client.router.refresh(Deadline.after(seconds), whole=True)
    if pchannel in client.router.known():
        route = client.router.route(pchannel)
        deliver_single(lambda deadline: route.act(calls.RESTART, request, deadline), deadline=Deadline.after(seconds))


def parked_names(folder: Path) -> frozenset[str]:
    """Return the parked PChannels. One directory listing: cheap enough for each poll."""
    try:
        return frozenset(name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return frozenset()


def read_parked(folder: Path) -> list[Parked]:
    """Return the parked PChannels with their reasons, sorted. A file parks its PChannel even if it is unreadable."""
    found = []
    for name in sorted(parked_names(folder)):
        path = folder / f"{name}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found.append(Parked(**{**data, "position": LogId(*data["position"])}))
        except FileNotFoundError:  # unparked meanwhile
            continue
        except (ValueError, KeyError, TypeError) as error:
            words = f"cannot read the reason in {path} ({error})"
            found.append(Parked(name, Malformed.code, words, EARLIEST, ""))
    return found
