"""Machines of a test: network namespaces on a bridge, in which named folders of this machine are empty."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.base.package import ROOT

BRIDGE = "millrace0"
HOST = "10.77.0.1"
"""This machine, as the others see it."""


def require_namespaces() -> None:
    """Skip the test, in words, where this user may not make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("machines without a shared folder are network namespaces: run as root, with iproute2")


@dataclass(frozen=True)
class Machine:
    """A namespace with one address."""

    number: int

    @property
    def host(self) -> str:
        return f"10.77.0.{self.number + 2}"

    def within(self, folder: Path, *, hidden: Sequence[Path], shown: Path | None = None) -> list[str]:
        """Return a command that runs another one here. The folders `hidden` are empty.

        With `shown`, that folder appears as `folder`/spark, and this checkout is empty too.
        """
        mounts = [f"mount -t tmpfs none {each}" for each in hidden]
        if shown is not None:
            place = folder / "spark"
            place.mkdir(parents=True, exist_ok=True)
            mounts = [f"mount --bind {shown} {place}", f"mount -t tmpfs none {ROOT.parent}", *mounts]
        script = " && ".join([*mounts, f"export HOME={folder}", "cd /", 'exec "$@"'])
        ip = shutil.which("ip")
        assert ip
        return [ip, "netns", "exec", f"millrace{self.number}", "sh", "-c", script, "sh"]

    def kill_all(self) -> None:
        """SIGKILL to every process here, as when a machine or a pod ends."""
        ip = shutil.which("ip")
        assert ip
        command = [ip, "netns", "pids", f"millrace{self.number}"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut_off(self) -> None:
        _ip(f"link set mr{self.number} down")

    def join(self) -> None:
        _ip(f"link set mr{self.number} up")


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Yield that many machines beside this one."""
    made = [Machine(number) for number in range(count)]
    _remove(made)
    try:
        for command in (f"link add {BRIDGE} type bridge", f"addr add {HOST}/24 dev {BRIDGE}", f"link set {BRIDGE} up"):
            _ip(command)
        for each in made:
            name, end = f"millrace{each.number}", f"mr{each.number}"
            _ip(f"netns add {name}")
            _ip(f"link add {end} type veth peer name eth0 netns {name}")
            _ip(f"link set {end} master {BRIDGE} up")
            _ip(f"-n {name} addr add {each.host}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
        yield made
    finally:
        _remove(made)


def _remove(made: Sequence[Machine]) -> None:
    for each in made:
        _ip(f"netns del millrace{each.number}", check=False)
        _ip(f"link del mr{each.number}", check=False)  # a process that stays keeps its namespace
    _ip(f"link del {BRIDGE}", check=False)


def _ip(command: str, *, check: bool = True) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=30, check=False)
    assert not check or done.returncode == 0, f"ip {command}: {done.stderr}"
