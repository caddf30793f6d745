"""The state stores the checksum of the last entry's bytes, whatever its content and size."""

from __future__ import annotations

from itertools import permutations

import crc32c
import pytest

from millrace.message.ids import LogId
from millrace.message.log_entries import LogEntries
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState
from tests.message.samples import entries
from tests.node.log_samples import accepted, opening, rejected

LARGE = rejected(b"\x17" * (1 << 20))
BROKEN = LARGE[:-1] + b"\xff"  # its own checksum does not hold
NONE = b"\x2a" * (1 << 20)


@pytest.mark.parametrize("order", list(permutations([accepted(), LARGE, BROKEN, NONE])))
def test_the_last_entrys_checksum_is_that_of_its_bytes(order: tuple[bytes, ...]) -> None:
    values = [opening(), *order]
    run = LogEntries(entries(values), LogId(0, len(values)))
    outcome = Chain().process(ChannelState.new("p0"), run)
    assert outcome.state.last_entry_crc == crc32c.crc32c(values[-1])
    assert outcome.rejections.num_rows == 3
