"""Whatever producers did to the channels, packs divide the messages exactly, in order; each position leads back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.log.protocol import LogService
from millrace.log.rocksmq.disk import OsDisk
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import LogId
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.tick_stream import LogTtMsgStream
from tests.conformance.backends import SETTINGS
from tests.msgstream.messages import append

LAST = 99
"""The tick with which every channel ends."""

item = st.one_of(
    st.integers(1, 60).map(str),
    st.integers(1, 60).map(lambda ts: f"t{ts}"),
    st.sampled_from(["?", "t10", "t20", "t30"]),
)
scripts = st.lists(st.lists(item, max_size=14), min_size=1, max_size=3)
names = itertools.count()


class Unsynced(OsDisk):
    """No machine fails here, and hundreds of logs are made: the disk need not be waited for."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogService]:
    with RocksMQ(tmp_path_factory.mktemp("log") / "data", settings=SETTINGS, disk=Unsynced()) as service:
        yield service


def written(log: LogService, scripts: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Channels with these contents, each message with an id of its own, each ended by the last tick.

    Those before go.
    """
    for name in log.names():
        log.drop(name)
    numbers = itertools.count(1)
    channels, contents = [], []
    for script in scripts:
        content = [each if each[0] in "t?" else f"{each}#{next(numbers)}" for each in script] + [f"t{LAST}"]
        name = f"c{next(names)}"
        log.create(name)
        append(log, name, content)
        channels.append(name)
        contents.append(content)
    return channels, contents


def expected(contents: list[list[str]]) -> tuple[list[tuple[int, list[int]]], set[int]]:
    """Each pack's end and the ids of its messages, and the ids of late messages: from the scripts alone."""
    ticks: set[int] = set()
    good: list[tuple[int, int, int, int]] = []
    late: set[int] = set()
    for channel, content in enumerate(contents):
        seen = 0
        for place, each in enumerate(content):
            if each[0] == "t":
                seen = max(seen, int(each[1:]))
                ticks.add(seen)
            elif each != "?":
                ts, number = map(int, each.split("#"))
                if ts <= seen:
                    late.add(number)
                else:
                    good.append((ts, channel, place, number))
    packs, begin = [], 0
    for end in sorted(ticks):
        packs.append((end, [number for ts, _, _, number in sorted(good) if begin < ts <= end]))
        begin = end
    return packs, late


def opened(log: LogService, channels: list[str], read_bytes: int, group: str = "") -> LogTtMsgStream:
    stream = LogTtMsgStream(log, settings=StreamSettings(timeout=10.0, read_bytes=read_bytes, auto_ack=False))
    stream.as_consumer(channels, group)
    stream.start()
    return stream


def all_packs(stream: LogTtMsgStream) -> list[MsgPack]:
    packs = []
    while not packs or packs[-1].end_ts < LAST:
        packs.append(stream.consume())
    return packs


@given(scripts=scripts, read_bytes=st.sampled_from([1, 150, 1 << 20]))
@example(scripts=[["15", "5", "t10", "8", "t20"], ["t10", "12", "35"]], read_bytes=1)
def test_packs_divide_the_messages_exactly_and_in_order(
    log: LogService, scripts: list[list[str]], read_bytes: int
) -> None:
    channels, contents = written(log, scripts)
    packs, late = expected(contents)
    with opened(log, channels, read_bytes) as stream:
        found = all_packs(stream)
    assert [(pack.end_ts, [msg.id for msg in pack.msgs]) for pack in found] == packs
    refused = [each for pack in found for each in pack.refused]
    assert sorted(each.msg.id for each in refused if each.msg is not None) == sorted(late)
    assert sum(each.reason == "malformed" for each in refused) == sum(content.count("?") for content in contents)
    for before, after in itertools.pairwise(found):
        assert (before.end_ts, before.end_positions) == (after.begin_ts, after.start_positions)


@given(scripts=scripts, read_bytes=st.sampled_from([1, 150, 1 << 20]), data=st.data())
def test_seeking_to_any_packs_positions_gives_the_same_packs(
    log: LogService, scripts: list[list[str]], read_bytes: int, data: st.DataObject
) -> None:
    channels, _ = written(log, scripts)
    with opened(log, channels, read_bytes) as stream:
        packs = all_packs(stream)
        for number in data.draw(st.lists(st.integers(0, len(packs) - 1), min_size=1, max_size=3)):
            for sought in (stream, opened(log, channels, 1 << 20)):
                sought.seek(packs[number].start_positions)
                assert all_packs(sought) == packs[number:]
                if number + 1 < len(packs):
                    sought.seek(packs[number].end_positions)
                    assert sought.consume() == packs[number + 1]
                if sought is not stream:
                    sought.close()


@given(scripts=scripts, data=st.data())
def test_a_group_that_ends_and_begins_anew_at_any_pack_has_every_pack_once(
    log: LogService, scripts: list[list[str]], data: st.DataObject
) -> None:
    channels, _ = written(log, scripts)
    with opened(log, channels, 1 << 20) as stream:
        packs = all_packs(stream)
    group = f"g{next(names)}"
    done: list[MsgPack] = []
    while len(done) < len(packs):
        with opened(log, channels, 1 << 20, group) as stream:
            for _ in range(data.draw(st.integers(1, len(packs) - len(done)))):
                pack = stream.consume()
                stream.ack(pack)
                done.append(pack)
            if len(done) < len(packs):
                stream.consume()  # in hand, not acknowledged: it comes again

    def content(found: list[MsgPack]) -> list[tuple[int, int, list[object], int]]:
        return [(pack.begin_ts, pack.end_ts, list(pack.msgs), len(pack.refused)) for pack in found]

    assert content(done) == content(packs)


class Died(Exception):
    """The consumer's process ends here."""


class Dying:
    """A log in whose consumer's hands groups move only so often, and never after that."""

    def __init__(self, log: LogService) -> None:
        self._log = log
        self.moves = 1 << 30

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        if not self.moves:
            raise Died
        self.moves -= 1
        self._log.move_group(group, pchannel, position)


deaths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=2)
"""Of each consumer: how many packs it acknowledges, and how many channels' moves of the next
acknowledgement it lives through.
"""


@settings(max_examples=max(1, settings.default.max_examples // 4))  # each is three consumers' lives
@given(scripts=scripts, deaths=deaths)
@example(scripts=[["15", "5", "t10", "25", "t20", "t30"]], deaths=[(1, 0)])
def test_consumers_that_die_in_an_acknowledgement_lose_nothing_and_get_nothing_again_that_was_acknowledged(
    log: LogService, scripts: list[list[str]], deaths: list[tuple[int, int]]
) -> None:
    channels, contents = written(log, scripts)
    packs, _ = expected(contents)
    group = f"g{next(names)}"
    acknowledged: list[int] = []
    seen: set[int] = set()
    for number, (lives, moves) in enumerate([*deaths, (100, 0)], 1):
        for channel in channels:
            append(log, channel, [f"t{LAST + number}"])  # there is always another pack
        service = Dying(log)
        with opened(cast(LogService, service), channels, 1 << 20, group) as stream:
            end = 0
            while end < LAST + number:
                pack = stream.consume()
                end, got = pack.end_ts, [each.id for each in pack.msgs]
                assert not set(got) & set(acknowledged)
                seen.update(got)
                if not lives:
                    service.moves = min(moves, len(channels) - 1)
                    with suppress(Died):
                        stream.ack(pack)
                    break
                lives -= 1
                stream.ack(pack)
                acknowledged += got
    assert len(acknowledged) == len(set(acknowledged))
    assert seen == {number for _, ids in packs for number in ids}
