"""Strategies for random logs: *scripts* of small tuples of choices, where zero is what a good producer does.

A script means something only to a :class:`~tests.laws.scribe.Scribe`, which resolves each choice against the state at
that point ("the first open transaction"); so a script shrinks choice by choice and stays sensible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from millrace.message.types import MessageType as T


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """One of several strategies by weight (`one_of` drops repetitions); shrinks to the first."""
    places = [place for place, (weight, _) in enumerate(choices) for _ in range(weight)]
    return st.sampled_from(places).flatmap(lambda place: choices[place][1])


def mostly(*others: int, weight: int = 12) -> st.SearchStrategy[int]:
    """0, and now and then one of `others`."""
    return st.sampled_from([0] * weight + list(others))


@dataclass(frozen=True)
class Frame:
    """The part of a message that is independent of its type; 0 is what a good producer does."""

    vchannel: int = 0  # among those that exist, then those that do not
    term: int = 0  # added to the open term
    barrier: int = 0  # 0 none, 1 last tick, 2 just ahead, 3 beyond a lease, 4 too far
    producer: int = 0  # 0 not idempotent
    sequence: int = 0  # 0 the next one, -k a retry, +k a gap
    epoch: int = 0  # added to the known epoch
    collection: int = 0  # 0 the right id, 1 another, 2 none


FRAMES = st.builds(
    Frame,
    vchannel=st.sampled_from([0] * 20 + [1] * 6 + [2] * 6 + [3]),
    term=mostly(-1, 1, weight=40),
    barrier=mostly(1, 2, 3, 4, weight=40),
    producer=mostly(1, 1, 1, 1, 1, 1, 2, 2, 3, weight=9),
    sequence=mostly(-1, -1, -2, -3, -4, -6, 1, weight=24),
    epoch=mostly(1, 1, -1, -1, weight=24),
    collection=mostly(1, 2, weight=60),
)
PARTITION = mostly(1, 1, 1, 2, 3, weight=14)  # 0 the first, 1 the second, 2 an unknown one, 3 none
DML = st.tuples(
    st.sampled_from(["insert", "insert", "insert", "insert", "delete", "upsert", "upsert"]),
    FRAMES,
    PARTITION,
    st.integers(1, 4),  # rows
    mostly(
        1, 1, 1, 1, 2, 2, 3, 4, weight=7
    ),  # transaction: none, the first open here, the last, the last ended, unknown
    mostly(-1, -1, 1, weight=24),  # schema version, from the newest
    mostly(1, 2, 3, 4, 5, 6, 7, 8, weight=60),  # flaw
)
TXN = weighted(
    (4, st.tuples(st.just("begin"), FRAMES, mostly(1, 2, weight=16), mostly(1, 1, 2, 3, 4, weight=7))),
    # Of which transaction: the first open anywhere, the last, the last ended of the VChannel, an unknown one.
    (5, st.tuples(st.sampled_from(["commit", "commit", "rollback", "keep_alive"]), FRAMES, mostly(1, 1, 1, 2, 2, 3))),
)
DDL = weighted(
    (3, st.tuples(st.just("manual_flush"), FRAMES, PARTITION, mostly(1, 2, 3, weight=3))),
    (2, st.tuples(st.just("create_collection"), FRAMES, mostly(1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 7, 8, 9))),
    (1, st.tuples(st.just("drop_collection"), FRAMES)),
    (2, st.tuples(st.just("create_partition"), FRAMES, st.integers(1, 4), mostly(1))),
    (1, st.tuples(st.just("drop_partition"), FRAMES, PARTITION)),
    (
        3,
        st.tuples(
            st.just("schema_change"), FRAMES, mostly(1, 2, 3, 4, *range(5, 30), *range(8, 11), *range(16, 21), weight=4)
        ),
    ),
    (1, st.tuples(st.just("flush_all"), FRAMES, mostly(1, weight=5))),
    (
        3,
        st.tuples(
            st.just("import"),
            FRAMES,
            st.lists(PARTITION, max_size=3),  # of each file
            st.booleans(),  # replace
            mostly(-1, -1, 1, weight=12),  # schema version, from the newest
            mostly(1, 2, 3, 4, 5, 6, 7, 8, weight=16),  # flaw
        ),
    ),
)
CONTROL = weighted(
    (2, st.tuples(st.just("opening"), FRAMES, mostly(1, 2, 3, 4, weight=4))),
    (2, st.tuples(st.just("alter_wal"), FRAMES, mostly(1, 2, 3, 4, weight=10))),
    (2, st.tuples(st.just("config"), FRAMES, st.integers(0, 10))),
    (
        1,
        st.tuples(
            st.just("foreign"),
            FRAMES,
            st.sampled_from([T.CREATE_SEGMENT, T.FLUSH, T.SEARCH, T.LOAD_COLLECTION, 999, 65_000]),
        ),
    ),
)
TICK = st.tuples(st.just("tick"), FRAMES)
BURST = st.tuples(st.just("burst"), FRAMES, PARTITION, st.sampled_from([3, 8, 25]), mostly(1, 1, 2, weight=2))
OPS = weighted((32, DML), (18, TXN), (2, TICK), (4, DDL), (3, CONTROL), (3, BURST))
"""One op: its name, the frame, choices of its own."""

GARBAGE = st.sampled_from([b"", b"garbage", b"MLR", bytes(64)])
AFTER_MS = [0] * 12 + [
    1,
    1,
    1,
    2,
    7,
    7,
    7,
    20,
    30,
    30,
    50,
    50,
    51,
    120,
    150,
    200,
    300,
    301,
    400,
    401,
    1_000,
    1_100,
    100_000,
]
ENTRIES = st.tuples(
    st.sampled_from(AFTER_MS),  # since the entry before
    weighted((30, st.lists(OPS, min_size=1, max_size=9)), (1, GARBAGE)),
)
SCRIPTS = st.tuples(
    st.sampled_from(["keep"] * 16 + ["replace"] * 8 + ["two keys"] * 8 + ["rules"] * 8 + [""]),
    st.lists(ENTRIES, min_size=1, max_size=24),
)
"""A log before it is written.

Whether it begins with the usual opening, its collection 2 with what on_duplicate, its
collection 1 with what key; its entries.
"""
