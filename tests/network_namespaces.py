"""Machines of a test: network namespaces on a bridge, in which named folders of this machine are empty."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.base.package import ROOT

RIGS = 200
"""Rigs that may be there at once, each with a network of its own."""
_LOCKS = Path("/tmp/millrace-networks")


def require_namespaces() -> None:
    """Skip the test, in words, where this user may not make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("machines without a shared folder are network namespaces: run as root, with iproute2")


@dataclass(frozen=True)
class Machine:
    """A namespace with one address."""

    number: int
    rig: int

    @property
    def host(self) -> str:
        return f"10.78.{self.rig}.{self.number + 2}"

    @property
    def home(self) -> str:
        """The machine that runs the test, as this one sees it."""
        return home_of(self.rig)

    @property
    def namespace(self) -> str:
        return f"mr{self.rig}-{self.number}"

    @property
    def link(self) -> str:
        """Of at most 15 characters, as the kernel has it."""
        return f"mr{self.rig}v{self.number}"

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
        return [ip, "netns", "exec", self.namespace, "sh", "-c", script, "sh"]

    def kill_all(self) -> None:
        """SIGKILL to every process here, as when a machine or a pod ends."""
        ip = shutil.which("ip")
        assert ip
        command = [ip, "netns", "pids", self.namespace]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut_off(self) -> None:
        _ip(f"link set {self.link} down")

    def join(self) -> None:
        _ip(f"link set {self.link} up")


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Yield that many machines beside this one, in a network that no other process has."""
    with _own_rig() as rig:
        made = [Machine(number, rig) for number in range(count)]
        bridge = bridge_of(rig)
        _remove(rig)  # of a process that was killed
        try:
            _ip(f"link add {bridge} type bridge")
            _ip(f"addr add {home_of(rig)}/24 dev {bridge}")
            _ip(f"link set {bridge} up")
            for each in made:
                name = each.namespace
                _ip(f"netns add {name}")
                _ip(f"link add {each.link} type veth peer name eth0 netns {name}")
                _ip(f"link set {each.link} master {bridge} up")
                _ip(f"-n {name} addr add {each.host}/24 dev eth0")
                _ip(f"-n {name} link set eth0 up")
                _ip(f"-n {name} link set lo up")
            yield made
        finally:
            _remove(rig)


def home_of(rig: int) -> str:
    return f"10.78.{rig}.1"


def bridge_of(rig: int) -> str:
    return f"mr{rig}b"


@contextmanager
def _own_rig() -> Iterator[int]:
    """Yield the number of a rig, which is another's when its process has ended."""
    _LOCKS.mkdir(exist_ok=True)
    for number in range(RIGS):
        handle = os.open(_LOCKS / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue
        try:
            yield number
        finally:
            os.close(handle)
        return
    raise AssertionError(f"{RIGS} rigs of network namespaces are there at once")


def _remove(rig: int) -> None:
    """Remove all of a rig, whoever made it, with the processes in it."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=False).stdout
    for line in listed.splitlines():
        name = line.partition(" ")[0]
        if name.startswith(f"mr{rig}-"):
            Machine(int(name.rpartition("-")[2]), rig).kill_all()
            _ip(f"netns del {name}", check=False)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, timeout=30, check=False).stdout
    for name in re.findall(rf"^\d+: (mr{rig}v\d+)@", links, re.MULTILINE):
        _ip(f"link del {name}", check=False)  # a process that stays keeps its namespace
    _ip(f"link del {bridge_of(rig)}", check=False)


def _ip(command: str, *, check: bool = True) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=30, check=False)
    assert not check or done.returncode == 0, f"ip {command}: {done.stderr}"
