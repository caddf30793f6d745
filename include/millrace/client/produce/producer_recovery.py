"""What a producer that is gone may have sent behind the place from which another goes on, and what of it stands.

The place is by VChannel an epoch and the next sequence; behind it lies one call of the producer's, whose messages came in one order in
every attempt. The chain knows them again by their numbers. Where it has forgotten the producer, or an attempt before this one was
told so and began an epoch, the WAL knows: what the chain forgot is long in there. Every attempt sends what it has left in the call's
order, and what it left out it had an answer for; so what the WAL has, epoch by epoch and in order, is found again by what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from millrace.base.errors import AppendRejected, AppendUnresolved, ProducerFenced
from millrace.client.produce.sequencer import OutboundEntry
from millrace.rpc.outcome import AppendResult
from millrace.wal.reasons import Reason


class AppliedMessage(NamedTuple):
    """A message of a producer that took effect."""

    vchannel: str
    epoch: int
    sequence: int
    payload: bytes
    result: AppendResult


AppliedLookup: TypeAlias = Callable[[str, int, int], Iterable[AppliedMessage]]
"""(PChannel, producer id, tick) -> what the producer has in the WAL behind the tick, all of it up to now. Raises TickNotReached while
the WAL is behind, PositionTruncated where retention has been at it."""

MessageRef: TypeAlias = tuple[OutboundEntry, int]
"""A message: its Sending, and where it is in there."""


def unknown_vchannels(sent: Iterable[OutboundEntry]) -> set[str]:
    """The VChannels on which the numbers of `sent` say nothing any more: nothing came of a message, an epoch was begun behind its own, or
    its result is no longer kept."""
    return {
        message.vchannel
        for sending in sent
        for message, answer in zip(sending.messages, sending.answers, strict=True)
        if answer is None
        or isinstance(answer, ProducerFenced)
        or (isinstance(answer, AppendRejected) and answer.reason == Reason.ALREADY_APPLIED)
    }


def match_applied(
    sent: Sequence[OutboundEntry],
    numbers: Mapping[str, tuple[int, int]],
    stood: Iterable[AppliedMessage],
) -> tuple[list[MessageRef], dict[str, int]]:
    """Answer those messages on the VChannels of `numbers` that stand; the others, in order, and by VChannel the newest epoch there.

    `numbers` are the epoch and sequence of the first message of each. Raises AppendUnresolved where the WAL has others.
    """
    known: dict[str, dict[int, list[AppliedMessage]]] = {}
    for each in sorted(stood, key=lambda each: (each.epoch, each.sequence)):
        if each.vchannel in numbers and (each.epoch, each.sequence) >= numbers[each.vchannel]:
            known.setdefault(each.vchannel, {}).setdefault(each.epoch, []).append(each)
    rest: dict[str, list[MessageRef]] = {name: [] for name in numbers}
    for sending in sent:
        for at, message in enumerate(sending.messages):
            if message.vchannel in rest:
                rest[message.vchannel].append((sending, at))
    left: list[MessageRef] = []
    for name, epochs in known.items():
        for stand in epochs.values():
            rest[name] = _without(rest[name], stand)
    for name in numbers:
        left += rest[name]
    return left, {name: max([numbers[name][0], *known.get(name, {})]) for name in numbers if rest[name]}


def _without(tried: list[MessageRef], stand: Sequence[AppliedMessage]) -> list[MessageRef]:
    """What an attempt that sent some of `tried`, in order, left of it; what stands of it has its answer then."""
    left: list[MessageRef] = []
    found = iter(stand)
    wanted = next(found, None)
    for sending, at in tried:
        if wanted is not None and bytes(sending.messages[at].payload) == wanted.payload:
            sending.answers[at] = wanted.result
            wanted = next(found, None)
        else:
            left.append((sending, at))
    if wanted is not None:
        raise AppendUnresolved(
            f"{wanted.vchannel} has other rows of this producer than those that are sent again (epoch {wanted.epoch}, sequence"
            f" {wanted.sequence}): read which of them are there, and load the rest as another load"
        )
    return left
