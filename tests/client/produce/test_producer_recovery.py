"""What a call that was begun several times, under numbers that were forgotten, has left.

Each message stands once in the end.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import AppendRejected, AppendUnresolved, ProducerFenced
from millrace.client.produce.producer_recovery import AppliedMessage, match_applied, unknown_vchannels
from millrace.client.produce.sequencer import OutboundEntry
from millrace.message.ids import MessageId
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.rpc.outcome import AppendResult
from millrace.wal.reasons import Reason

NAMES = ("p0_1v0", "p0_1v1")
FIRST = {"p0_1v0": (1, 7), "p0_1v1": (3, 0)}
GOOD, BAD = "abc", "x"
"""Payloads that the chain takes, and one that it refuses whenever it comes."""


def message(name: str, payload: str) -> MutableMessage:
    return MutableMessage(type=MessageType.INSERT, vchannel=name, payload=payload.encode())


def result(tick: int) -> AppendResult:
    return AppendResult(MessageId(0, tick, 0, 0), None, tick)


def sendings(groups: list[list[tuple[str, str]]]) -> list[OutboundEntry]:
    made = [OutboundEntry([message(*each) for each in group]) for group in groups]
    for each in made:
        each.answers = [None] * len(each.messages)
    return made


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(GOOD + BAD)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=4),
)
def test_what_is_left_is_what_no_attempt_had_taken(
    groups: list[list[tuple[str, str]]], attempts: list[tuple[int, bool]]
) -> None:
    """An attempt comes so far on each VChannel.

    One that goes on in the same process leaves out what was refused, a new one does not.
    """
    stood: list[AppliedMessage] = [AppliedMessage(NAMES[0], 1, 6, b"a", result(1))]  # of the call before
    taken: Counter[tuple[str, str]] = Counter()
    for name in NAMES:
        epoch, first = FIRST[name]
        rest = [payload for group in groups for each, payload in group if each == name]
        for reached, forgets in attempts:
            left = []
            for sequence, payload in enumerate(islice(rest, reached), first):
                if payload == BAD:
                    left += [payload] * forgets
                else:
                    stood.append(AppliedMessage(name, epoch, sequence, payload.encode(), result(len(stood) + 1)))
                    taken[name, payload] += 1
            rest, epoch, first = [*left, *rest[reached:]], epoch + 1, 0
    sent = sendings(groups)
    left_places, newest = match_applied(sent, FIRST, stood)
    answers = [(each, answer) for part in sent for each, answer in zip(part.messages, part.answers, strict=True)]
    found = Counter((each.vchannel, bytes(each.payload).decode()) for each, answer in answers if answer is not None)
    assert found == taken
    assert len({answer.time_tick for _, answer in answers if isinstance(answer, AppendResult)}) == taken.total()
    open_ones = [(part, at) for part in sent for at in part.unanswered]
    assert sorted(left_places, key=open_ones.index) == open_ones, "what is left is what has no answer"
    for name in NAMES:
        mine = [each for each in left_places if each[0].messages[each[1]].vchannel == name]
        assert mine == [each for each in open_ones if each[0].messages[each[1]].vchannel == name], "in its order"
        if mine:
            assert newest[name] >= max((each.epoch for each in stood if each.vchannel == name), default=0)


def test_a_wal_that_has_other_messages_under_these_numbers_stops_the_call() -> None:
    sent = sendings([[(NAMES[0], "a"), (NAMES[0], "b")]])
    with pytest.raises(AppendUnresolved, match="other rows"):
        match_applied(sent, FIRST, [AppliedMessage(NAMES[0], 1, 7, b"z", result(1))])


def test_numbers_are_forgotten_where_nothing_came_of_a_message_or_an_epoch_is_behind_it() -> None:
    sent = sendings([[(NAMES[0], "a"), (NAMES[1], "b")]])
    assert unknown_vchannels(sent) == set(NAMES)
    sent[0].answers = [result(1), AppendRejected("no", reason=Reason.CHECK_VIOLATED)]
    assert unknown_vchannels(sent) == set()
    for lost in (ProducerFenced("gone"), AppendRejected("long ago", reason=Reason.ALREADY_APPLIED)):
        sent[0].answers = [result(1), lost]
        assert unknown_vchannels(sent) == {NAMES[1]}
