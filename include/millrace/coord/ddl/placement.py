"""Placement of a new collection's VChannels on the PChannels of the deployment.

A VChannel goes to the PChannel with the fewest VChannels. The VChannels of one collection go to different PChannels as
long as there are enough. Existing collections stay where they are: a VChannel's name contains its PChannel. So
PChannels that are added later get the next collections, and a dropped collection frees its place.

The placement is a pure function of the counts in the catalog, so that two coordinators with the same catalog choose the
same PChannels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from millrace.base.errors import AppendRejected
from millrace.wal.definitions import PChannelDefinitions
from millrace.wal.reasons import Reason

ADVICE: Final = (
    "add PChannels (`millrace log pchannels --count`), raise max_vchannels of the chain's config"
    " (docs/operating.md#thresholds-of-the-chain), or drop collections"
)


def place_vchannels(count: int, counts: Mapping[str, int], *, free: Mapping[str, int] | None = None) -> list[str]:
    """Return the PChannels of `count` new VChannels of one collection, in the order of the VChannels.

    `counts`: the VChannels of each PChannel. `free`: how many more VChannels a PChannel takes, as far as that is known.
    The result is shorter than `count` if the PChannels are full.
    """
    free = free or {}
    queue = [(0, taken, len(name), name) for name, taken in counts.items()]  # dml_2 before dml_10
    heapify(queue)
    chosen: list[str] = []
    while queue and len(chosen) < count:
        own, taken, length, name = heappop(queue)
        if own < free.get(name, count):
            chosen.append(name)
            heappush(queue, (own + 1, taken + 1, length, name))
    return chosen


def place_collection(
    name: str,
    vchannels: int,
    partitions: int,
    counts: Mapping[str, int],
    ask: Callable[[str], PChannelDefinitions],
) -> list[str]:
    """Return PChannels for a new collection's VChannels. The chain accepts all of them.

    `ask` returns what the chain has on a PChannel. It is asked about the chosen PChannels only: about another one if a
    PChannel has no room.

    Raises AppendRejected (LIMIT_EXCEEDED).
    """
    free: dict[str, int] = {}
    limit = 0
    while True:
        chosen = place_vchannels(vchannels, counts, free=free)
        if len(chosen) < vchannels:
            raise AppendRejected(
                f"{name!r} needs {vchannels:,} VChannels, and the {len(counts):,} PChannels have room for"
                f" {len(chosen):,}: each has at most {limit:,} (max_vchannels). Use fewer VChannels, {ADVICE}",
                reason=Reason.LIMIT_EXCEEDED,
            )
        unknown = [each for each in dict.fromkeys(chosen) if each not in free]
        if not unknown:
            return chosen
        for each in unknown:
            found = ask(each)
            if partitions > found.max_partitions:
                raise AppendRejected(
                    f"{name!r} has {partitions:,} partitions; a collection has at most {found.max_partitions:,}"
                    " (max_partitions of the chain's config)",
                    reason=Reason.LIMIT_EXCEEDED,
                )
            free[each] = max(0, found.max_vchannels - found.vchannel_count)
            limit = max(limit, found.max_vchannels)
