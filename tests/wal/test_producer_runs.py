"""Messages of many new producers are judged together while there is room for all, to the same effect as one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.message import builders
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.wal.chain import CHAIN_VERSION, Chain, ChainOutcome
from millrace.wal.interceptors.interceptor import Interceptor, Proceed
from millrace.wal.message_run import MessageRun
from millrace.wal.state import ChannelState
from tests.laws.profile import examples
from tests.node.append.samples import insert
from tests.wal.test_fast_path import HERE, KEYS, Log

FIRST = 1 << 60


class Counted:
    """An interceptor that counts the runs which it judges."""

    def __init__(self, link: Interceptor) -> None:
        self._link, self.runs = link, 0

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        self.runs += 1
        self._link.decide(state, run, proceed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def message(producer: int, *, epoch: int = 1, sequence: int = 0, barrier: int = 0) -> MutableMessage:
    made = insert(KEYS[producer % len(KEYS)], producer=producer, sequence=sequence)
    return replace(made, term=2, epoch=epoch, barrier_tick=barrier)


def begun(producers: int) -> ChannelState:
    log = Log()
    opened = builders.term_opening(term=2, chain_version=CHAIN_VERSION, config={"max_producers": producers})
    log.append(encode_entry([opened]))
    return log.state


def judged(chain: Chain, state: ChannelState, messages: Sequence[MutableMessage], place: int = 0) -> ChainOutcome:
    """An entry for each message, all with one stamp, from entry FIRST + `place` on."""
    count = len(messages)
    ids = list(range(FIRST + place, FIRST + place + count))
    values = [encode_entry([each]) for each in messages]
    batch = pa.record_batch([[0] * count, ids, [1_700_000_000_010] * count, values], schema=ENTRY_SCHEMA)
    return chain.process(state, LogEntries(batch, LogId(0, ids[-1] + 1)))


@pytest.mark.parametrize(("room", "runs"), [(101, 1), (100, 1), (50, 2), (10, 10), (1, 100)])
def test_new_producers_are_judged_together_while_those_that_they_evict_are_others(room: int, runs: int) -> None:
    links: list[Counted] = []

    def counted(link: Interceptor) -> Any:
        links.append(Counted(link))
        return links[-1]

    outcome = judged(Chain(wrap=counted), begun(room), [message(100 + number) for number in range(100)])
    assert outcome.messages.num_rows == 100
    assert links[0].runs == runs
    assert len(outcome.state.vchannels[HERE].producers) == room


MESSAGES = st.lists(
    st.builds(
        message,
        st.integers(1, 9),
        epoch=st.integers(0, 4),
        sequence=st.sampled_from([0, 0, 0, 1]),
        barrier=st.sampled_from([0, 1, 1_700_000_000_010 << 18, (1_700_000_000_010 << 18) + 20]),
    ),
    min_size=1,
    max_size=60,
)


@examples(150)
@given(MESSAGES, st.integers(1, 12))
# The third evicts the first, in the same run as the fourth, which has not read so far.
@example([message(1), message(2), message(3), message(4, barrier=(1_700_000_000_010 << 18) - 1)], 2)
# The same, too late already before the run: the words name the tick that is forgotten by then.
@example([message(1), message(2), message(3), message(4, barrier=1)], 2)
@example([message(number) for number in range(1, 9)] + [message(9, barrier=1)], 2)
def test_judged_together_or_one_by_one_they_leave_the_same_state(messages: list[MutableMessage], room: int) -> None:
    chain, state = Chain(fast=False), begun(room)
    together = judged(chain, state, messages)
    accepted, refused = [], []
    for place, each in enumerate(messages):
        outcome = judged(chain, state, [each], place)
        state = outcome.state
        accepted.append(outcome.messages)
        refused.append(outcome.rejections)
    assert together.state.to_bytes() == state.to_bytes()
    for rows, others in ((together.messages, accepted), (together.rejections, refused)):
        names = ["entry", "time_tick", "reason", "detail"]
        mine = [row for batch in others for row in batch.select(names).to_pylist()]
        assert rows.select(names).to_pylist() == mine
