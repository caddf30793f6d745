"""A signal ends a command: at the first one, with its code, without a word, whatever the command does just then."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import IO

import pytest

from tests.cli.deployment import Deployment

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SECONDS = 15.0
"""Within which a process has to have ended; it takes 2 at the most by itself."""

LOST = """
import sys, time
import millrace.commands.main
from millrace.__main__ import main
from millrace.commands import status

def deployment_status(settings):
    print("here", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass  # as a callback of a C library loses it

status.deployment_status = deployment_status
sys.argv = ["millrace", "status"]
main()
"""
"""A command that swallows what the signal's handler raises, and goes on. It sleeps for the signal to find it there."""

MADE_ANOTHER = LOST.replace("pass", "raise millrace.commands.parts.command_line.InvalidArgument('no') from None")
"""A command in which a library makes an error of its own of it."""

IN_FINALISER = """
import sys, time
import millrace.commands.main
from millrace.__main__ import main
from millrace.commands import status

class Slow:
    def __del__(self):
        print("here", flush=True)
        time.sleep(60)

def deployment_status(settings):
    Slow()
    time.sleep(60)

status.deployment_status = deployment_status
sys.argv = ["millrace", "status"]
main()
"""
"""A command that the signal finds in a finaliser, where Python drops what is raised."""


PATIENT = """
from millrace.commands.parts.interrupts import InterruptHandler
InterruptHandler.__init__.__kwdefaults__["grace"] = 600.0
"""
"""A command that has ten minutes to end in order."""

TOLD = """
from millrace.commands.parts.interrupts import InterruptHandler
from millrace.__main__ import main
install = InterruptHandler.install
def told(self):
    install(self)
    print("here", flush=True)
InterruptHandler.install = told
"""
"""Say when the signals are taken: what strikes Python before it has begun is not ours to answer."""


def start(*arguments: str, stdin: int | IO[bytes] = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[bytes], number: signal.Signals) -> bytes:
    """Send the signal once: the process has to end with its code and nothing on stderr. What it printed yet."""
    process.send_signal(number)
    try:
        out, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert errors.decode() == ""
    assert process.returncode == CODES[number]
    return out


@pytest.fixture(scope="module")
def users(shared: Deployment) -> Deployment:
    """The module's deployment with the collection ``users``, and a row in it."""
    shared.create_users()
    shared.produce({"id": 1})
    return shared


@pytest.mark.parametrize(
    "command, number",
    [
        ("scan dml_0 --follow", signal.SIGINT),
        ("scan dml_0 --follow", signal.SIGTERM),
        ("log read dml_0 --follow", signal.SIGINT),
    ],
)
def test_a_signal_ends_a_command_that_follows(users: Deployment, command: str, number: signal.Signals) -> None:
    process = start("-m", "millrace", *command.split(), "--data", str(users.settings.data_dir))
    assert process.stdout is not None
    process.stdout.readline()
    ended(process, number)


@pytest.mark.parametrize(
    "rows, number",
    [("jsonl", signal.SIGINT), ("jsonl", signal.SIGTERM), ("csv", signal.SIGINT), ("parquet", signal.SIGINT)],
)
def test_a_signal_ends_produce_that_waits_for_stdin_and_what_became_of_the_rows_is_told(
    users: Deployment, rows: str, number: signal.Signals
) -> None:
    command = ["-m", "millrace", "produce", "users", "-", "--format", rows, "--data", str(users.settings.data_dir)]
    process = start(*command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    begin = b"id,name\n" if rows == "csv" else b""
    process.stdin.write(begin + b"\n" * (1 << 18))  # more than a pipe holds: when it is written, the command reads
    process.stdin.flush()
    assert ended(process, number).startswith(b"Accepted 0 rows")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("program", [LOST, MADE_ANOTHER, IN_FINALISER], ids=["lost", "another", "finaliser"])
def test_a_signal_ends_a_command_in_which_it_gets_lost(program: str, number: signal.Signals) -> None:
    process = start("-c", program)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    ended(process, number)


def test_a_second_ctrl_c_does_not_wait_for_an_orderly_end() -> None:
    process = start("-c", PATIENT + LOST)
    assert process.stdout is not None
    process.stdout.readline()
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    while process.poll() is None and time.monotonic() - begun < SECONDS:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)  # between two presses of the key; the loop has a deadline
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (130, b"")


def test_ctrl_c_ends_a_command_whose_starter_ignores_it(users: Deployment) -> None:
    """A shell without job control has SIGINT ignored in what it starts in the background."""
    command = f"trap '' INT; exec {sys.executable} -m millrace scan dml_0 -f --data {users.settings.data_dir}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    ended(process, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_ends_a_following_scan_at_any_moment(users: Deployment, number: signal.Signals) -> None:
    dice = random.Random(7)
    for _ in range(40):
        process = start("-c", TOLD + "main()", "scan", "dml_0", "-f", "--data", str(users.settings.data_dir))
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(dice.random() * 1.5)  # the moment, not a wait for anything
        ended(process, number)
