"""Rigs of network namespaces: several at once, and nothing of one that was killed stays."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.package import ROOT
from tests.network_namespaces import RIGS, Machine, bridge_of, machines, require_namespaces

KILLED = """
import os, signal
from tests.network_namespaces import machines
with machines(1) as (one,):
    print(one.rig, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, timeout=30, check=True).stdout


def reached(machine: Machine) -> bool:
    """Whether this machine and that one reach each other: by a socket, since not every image has a ping."""
    code = f"import socket; socket.create_connection(({machine.home!r}, PORT), 3)"
    with socket.create_server((machine.home, 0)) as server:
        port = server.getsockname()[1]
        command = [*machine.within(Path("/tmp"), hidden=[]), sys.executable, "-c", code.replace("PORT", str(port))]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def test_names_fit_the_kernel_and_differ_from_rig_to_rig() -> None:
    rigs = [{each.namespace, each.link, each.host, each.home, bridge_of(rig)} for rig in (1, 11, RIGS - 1)
            for each in (Machine(1, rig), Machine(99, rig))]  # fmt: skip
    assert all(len(name) <= 15 for names in rigs for name in names)
    first, other = rigs[0] | rigs[1], rigs[2] | rigs[3]
    assert not first & other


def test_two_rigs_at_once_have_networks_of_their_own_and_leave_nothing() -> None:
    require_namespaces()
    with machines(1) as (one,), machines(2) as (two, three):
        assert one.rig != two.rig == three.rig
        assert all(reached(each) for each in (one, two, three))
        rigs = (one.rig, two.rig)
        failed = []
        with pytest.raises(ZeroDivisionError), machines(1) as (broken,):
            failed.append(1 // (broken.rig in rigs))
        assert not failed
        assert bridge_of(broken.rig) not in links()
        assert reached(one), "the others go on"
    assert not re.search(rf"mr({rigs[0]}|{rigs[1]})[bv]", links())


def test_a_rig_whose_process_was_killed_is_cleared_by_the_next_one_of_its_number() -> None:
    require_namespaces()
    done = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    rig = int(done.stdout)
    assert bridge_of(rig) in links()
    with machines(1) as (one,):
        assert one.rig == rig, "the first number that is free"
        assert reached(one)
    assert bridge_of(rig) not in links()
