"""Law 1: states share what a message does not change, and nothing else can tell them from full copies.

The copying version is here: each step starts from a state of its own, made from bytes, and the timers and open
transactions are found by a walk over everything.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.message.ids import MessageId
from millrace.wal.chain import Chain
from millrace.wal.segments import NEVER, seal_deadline
from millrace.wal.state import ChannelState
from tests.laws.profile import examples
from tests.laws.real import merged, new_state
from tests.laws.scribe import LOGS, Scribe

CUTS = st.sets(st.integers(1, 24), max_size=12)


def walked(state: ChannelState) -> tuple[int, MessageId | None, int, int]:
    """Next deadline, first Begin, number of open transactions and smallest flushable segment, by a walk."""
    channels = list(state.vchannels.values())
    txns = [txn for channel in channels for txn in channel.txns.values()]
    growing = [segment for channel in channels for segment in channel.growing.values()]
    deadlines = [txn.deadline(state.config) for txn in txns] + [seal_deadline(each, state.config) for each in growing]
    ready = [each.id for channel in channels for each in channel.sealed.values() if not each.txns]
    begin = min((txn.begin for txn in txns), default=None)
    return min(deadlines, default=NEVER), begin, len(txns), min(ready, default=NEVER)


@examples(80)
@given(LOGS, CUTS)
def test_sharing_gives_the_rows_and_states_of_copying_and_old_states_stay(log: Scribe, cuts: set[int]) -> None:
    shared, copied = new_state(), new_state()
    held: list[tuple[ChannelState, bytes]] = []
    chain, begin = Chain(), 0
    for cut in [*sorted(cut for cut in cuts if cut < len(log.written.entries)), len(log.written.entries)]:
        entries = log.written.read(begin, cut)
        one, other = chain.process(shared, entries), chain.process(ChannelState.from_bytes(copied.to_bytes()), entries)
        assert merged(one.messages, one.rejections) == merged(other.messages, other.rejections)
        shared, copied, begin = one.state, other.state, cut
        assert shared.to_bytes() == copied.to_bytes()
        assert shared == copied
        work = shared.open_work
        assert (shared.next_deadline(), shared.first_open_begin(), work.open_txns, work.ready) == walked(shared)
        assert work.growing == sum(len(channel.growing) for channel in shared.vchannels.values())
        assert [channel.name for channel, _ in shared.open_txns()] == [
            name for name, channel in shared.vchannels.items() for _ in channel.txns
        ]
        held.append((shared, shared.to_bytes()))
    for state, stored in held:
        assert state.to_bytes() == stored
