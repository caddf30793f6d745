"""A consumer that is killed with kill -9, again and again.

Every message comes, and what was acknowledged does not come again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from millrace.msgstream.factory import RmqMsgStreamFactory
from millrace.msgstream.messages import TimeTickMsg
from millrace.msgstream.pack import MsgPack
from millrace.rpc.remote_log import RemoteLogService
from tests.docs.code_facts import ROOT
from tests.msgstream.messages import message

TICKS = 240
SEED = 5


def produce(factory: RmqMsgStreamFactory, channels: list[str]) -> list[int]:
    """Messages on both channels, some on the wrong side of a tick; the ids in the order of the packs."""
    dice = random.Random(SEED)
    number = 0
    with factory.new_msg_stream() as stream:
        stream.as_producer(channels)
        for tick in range(10, 10 * TICKS + 1, 10):
            msgs = []
            for _ in range(dice.randrange(6)):
                number += 1
                msgs.append(message(tick + dice.choice((0, -3, 7)), number, key=number))
            stream.produce(MsgPack(msgs=list(msgs)))
            stream.broadcast(MsgPack(msgs=[TimeTickMsg(begin_ts=tick)]))
        stream.broadcast(MsgPack(msgs=[TimeTickMsg(begin_ts=10 * TICKS + 10)]))
    return list(range(1, number + 1))


def until_killed(folder: Path, channels: list[str], packs: int | None) -> list[list[str]]:
    """Run a consumer until it printed so many packs (None: to the last tick), kill it; the words of its lines."""
    command = [sys.executable, "-m", "tests.msgstream.consumer", str(folder), "g", *channels]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment())
    deadline = threading.Timer(60.0, process.kill)
    deadline.start()
    lines: list[list[str]] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.split())
            last = lines[-1][1] == str(10 * TICKS + 10)
            if lines[-1][0] == ("got" if packs is not None else "done") and (
                last or len(lines) >= 2 * (packs or 10**9)
            ):
                break
    finally:
        process.kill()
        rest, _ = process.communicate(timeout=30)
        deadline.cancel()
    # What it printed before the kill reached it counts as well; a line that was cut does not.
    lines += [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    return lines


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT / 'include'}:{ROOT}"}


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_consumer_goes_on_behind_its_last_acknowledged_pack(tmp_path: Path, kills: int) -> None:
    folder = tmp_path / "log"
    with RmqMsgStreamFactory.served(str(folder)) as factory:
        channels = ["a", "b"]
        for name in channels:
            factory.service.create(name)
        produced = produce(factory, channels)
        runs = [until_killed(folder, channels, 40) for _ in range(kills)]
        runs.append(until_killed(folder, channels, None))
        assert isinstance(factory.service, RemoteLogService)
        factory.service.shutdown()

    acknowledged, seen = 0, Counter[str]()
    for lines in runs:
        got = [line for line in lines if line[0] == "got"]
        done = [line[1] for line in lines if line[0] == "done"]
        assert [int(line[1]) for line in got] == sorted(int(line[1]) for line in got)
        # Nothing at or below what an earlier run acknowledged; an acknowledgement that was cut
        # by the kill may stand or not.
        assert int(got[0][1]) > acknowledged
        seen.update(word for line in got for word in line[2:])
        acknowledged = max([acknowledged, *map(int, done)])
    assert sorted(map(int, seen)) == produced
    again = sum(seen.values()) - len(produced)
    assert again <= 6 * 2 * kills  # at most one pack in hand a kill
