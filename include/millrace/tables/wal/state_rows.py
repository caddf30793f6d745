"""State rows of the ``wal`` table: a PChannel's state as a snapshot and the increments after it.

Each commit adds one row. It is an increment to the row before, or to an earlier one if small increments have piled up
(it then replaces those in between), or a snapshot, once the increments outweigh the last one. So a commit writes what
changed, a reader opens at most MAX_INCREMENTS + 1 small files, and a byte is rewritten a few times.

An increment names its base by commit and digest. The digest of a row is that of its bytes and of its base's digest, so
it covers the whole chain: a row that is lost, changed or out of order makes the chain invalid, never another state.
Decoded states are cached by this digest, in this process; without the cache they are made of the rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from millrace.base.errors import Malformed
from millrace.base.lru_cache import LruCache
from millrace.wal.state import ChannelState
from millrace.wal.state_increments import apply_increment, is_increment, make_increment

SMALL_STATE: Final = 8 << 10
"""A state whose last snapshot has at most this many bytes is stored whole: its file is hardly larger."""

MAX_INCREMENTS: Final = 8
"""Live increments of a PChannel. Each is a file that readers open and that commits carry along."""

_CACHED: Final = 512
"""Decoded states. Those of one PChannel share what did not change between them."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """One live state row."""

    path: str
    """Its file, relative to the table."""
    commits: int
    """Number of the PChannel's commits up to this row's."""
    digest: str
    base: tuple[int, str] | None
    """Commit and digest of the row that this increment follows; None for a snapshot."""
    size: int
    """Bytes of the state or increment."""
    payload: bytes | None = field(default=None, compare=False, repr=False)
    """Its bytes. They are not sent to other processes, which read the file if they need them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StateRow, (self.path, self.commits, self.digest, self.base, self.size)


@dataclass(frozen=True, slots=True)
class NextRow:
    """The row that a commit adds."""

    payload: bytes
    base: StateRow | None
    replaced: tuple[str, ...]
    """Files of the rows that it takes the place of."""

    @property
    def digest(self) -> str:
        return row_digest(self.payload, None if self.base is None else self.base.digest)


def row_digest(payload: bytes, base: str | None) -> str:
    """Return the digest of a row, given that of its base."""
    return xxhash.xxh3_128_hexdigest((base or "").encode() + payload)


def state_row(path: str, commits: int, payload: bytes, base: tuple[int, str] | None) -> StateRow:
    """Make the row of a file's content. Raises Malformed if an increment names no earlier base, or a state has one."""
    if is_increment(payload) != (base is not None) or (base is not None and base[0] >= commits):
        raise Malformed(f"the row of commit {commits} names the base {base}")
    digest = row_digest(payload, None if base is None else base[1])
    return StateRow(path, commits, digest, base, len(payload), payload)


def chain_of(rows: Iterable[StateRow], last: StateRow) -> tuple[StateRow, ...]:
    """Return the rows that `last` builds on, from the snapshot on, and `last`. Raises Malformed if one is missing."""
    known = {(row.commits, row.digest): row for row in rows}
    chain = [last]
    while (base := chain[-1].base) is not None:
        found = known.get(base)
        if found is None:
            raise Malformed(
                f"the state row of commit {base[0]}, on which that of commit {chain[-1].commits} builds, is not there "
                "or is another one"
            )
        chain.append(found)
    return tuple(reversed(chain))


def state_of(rows: Sequence[StateRow], read: Callable[[StateRow], bytes]) -> ChannelState:
    """Return the state of a chain of rows: from the cache, else from the bytes that `read` gives for a row.

    Raises UnsupportedVersion, Malformed, and what `read` raises.
    """
    known = len(rows)
    while known and (found := _decoded.get(rows[known - 1].digest)) is None:
        known -= 1
    state = found if known else None
    for row in rows[known:]:
        payload = row.payload if row.payload is not None else read(row)
        if row_digest(payload, None if row.base is None else row.base[1]) != row.digest:
            raise Malformed(f"the state row of commit {row.commits} is not the one that was planned with")
        if row.base is None:
            state = ChannelState.from_bytes(payload)
        else:
            assert state is not None  # a chain begins with a snapshot
            state = apply_increment(state, payload)
        _decoded.put(row.digest, state)
    assert state is not None
    return state.copy()


def next_row(
    rows: Sequence[StateRow], state: ChannelState, read: Callable[[StateRow], bytes], *, whole: bool = False
) -> NextRow:
    """Return the row for `state`, given the chain of its base; a snapshot if `whole`. Raises as :func:`state_of`."""
    if rows and rows[0].size > SMALL_STATE and not whole:
        chain = list(rows)
        payload = make_increment(state_of(chain, read), state)
        if len(chain) > MAX_INCREMENTS:
            # As merges of a log-structured tree: the new increment takes in those before that are not larger.
            size = len(payload)
            while len(chain) > 1 and (len(chain) > MAX_INCREMENTS or chain[-1].size <= size):
                size += chain.pop().size
            payload = make_increment(state_of(chain, read), state)
        # Made again from what it gives, an increment that left something out would differ: then nothing relies on it.
        base = state_of(chain, read)
        sound = make_increment(base, apply_increment(base, payload)) == payload
        if sound and sum(row.size for row in chain[1:]) + len(payload) < chain[0].size:
            return NextRow(payload, chain[-1], tuple(row.path for row in rows[len(chain) :]))
    return NextRow(state.to_bytes(), None, tuple(row.path for row in rows))


def remember(row: NextRow, state: ChannelState) -> None:
    """Cache the state of a row that may be committed, for later commits of this process."""
    _decoded.put(row.digest, state.copy())


_decoded: Final[LruCache[str, ChannelState]] = LruCache(_CACHED)
