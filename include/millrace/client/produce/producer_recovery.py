"""Recovery of a producer's last call: which of its messages took effect.

A producer that continues for a former one has its position: by VChannel an epoch and the next sequence. After the
position, there is at most one call, whose messages have the same order in every attempt. The chain recognizes them by
their numbers. If it has forgotten the producer, or an earlier attempt learned this and started an epoch, the WAL has
the answer, because what the chain forgot reached the WAL long ago. Each attempt sends, in the call's order, the
messages for which the previous ones had no answer. So the payloads of an epoch in the WAL, in order, match a
subsequence of the messages that were left.
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
"""(PChannel, producer id, tick) -> the producer's messages in the WAL after the tick, up to now.

Raises TickNotReached while the WAL is behind, PositionTruncated if retention has removed some.
"""

MessageRef: TypeAlias = tuple[OutboundEntry, int]
"""A message: its OutboundEntry, and its index there."""


def unknown_vchannels(sent: Iterable[OutboundEntry]) -> set[str]:
    """Return the VChannels on which the numbers of `sent` do not give the outcome.

    There, a message has no answer, an epoch was started after its own, or its result is no longer kept.
    """
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
    applied: Iterable[AppliedMessage],
) -> tuple[list[MessageRef], dict[str, int]]:
    """Answer the messages on the VChannels of `numbers` that took effect.

    `numbers` are the epoch and sequence of the first message of each VChannel. Returns the other messages, in order,
    and by VChannel the newest epoch there.

    Raises AppendUnresolved if the WAL has other messages.
    """
    known: dict[str, dict[int, list[AppliedMessage]]] = {}
    for each in sorted(applied, key=lambda each: (each.epoch, each.sequence)):
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
    """Return the messages of `tried` that an attempt did not send; answer those that it did, in order."""
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
            f"{wanted.vchannel} has other rows of this producer than those that are resent (epoch {wanted.epoch},"
            " sequence"
            f" {wanted.sequence}): read which of them are there, and load the rest as another load"
        )
    return left
