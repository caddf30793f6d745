"""Install Debian's packages where this user may: as root, or with a sudo that asks nothing. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def apt_installer(*, timeout: float = 600) -> AptInstaller | None:
    """What installs packages here; None where this user may not, or there is no apt-get."""
    apt = shutil.which("apt-get")
    if apt is None:
        return None
    prefix: list[str] = []
    if os.geteuid() != 0:
        sudo = shutil.which("sudo")
        if sudo is None or subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode != 0:
            return None
        prefix = [sudo, "-n"]
    return AptInstaller([*prefix, "env", "DEBIAN_FRONTEND=noninteractive", apt, "-q", "-y"], timeout)


class AptInstaller:
    """apt-get, quiet and without questions. What it says goes to standard error."""

    def __init__(self, command: list[str], timeout: float) -> None:
        self._command = command
        self._timeout = timeout

    def update(self) -> None:
        """Read the package lists anew. That may fail in part: a stale list may still know a package."""
        self._run("update")

    def install(self, *packages: str) -> bool:
        """Install all of them, or say that it did not work. One that is installed already is left at its version: other
        programs may be running on it."""
        return self._run("install", "--no-install-recommends", "--no-upgrade", *packages)

    def _run(self, *arguments: str) -> bool:
        command = [*self._command, *arguments]
        try:
            return subprocess.run(command, stdout=sys.stderr, timeout=self._timeout, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False
