"""Install Debian packages as root or with a passwordless sudo. Uses the standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def apt_installer(*, timeout: float = 600) -> AptInstaller | None:
    """Return the installer, or None without apt-get or the rights to use it."""
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
    """A wrapper of apt-get, quiet and non-interactive. Its output goes to stderr."""

    def __init__(self, command: list[str], timeout: float) -> None:
        self._command = command
        self._timeout = timeout

    def update(self) -> None:
        """Refresh the package lists. A partial failure is ignored: a stale list may still have a package."""
        self._run("update")

    def install(self, *packages: str) -> bool:
        """Install `packages` and return whether that worked.

        An installed package keeps its version: other programs may be running on it.
        """
        return self._run("install", "--no-install-recommends", "--no-upgrade", *packages)

    def _run(self, *arguments: str) -> bool:
        command = [*self._command, *arguments]
        try:
            return subprocess.run(command, stdout=sys.stderr, timeout=self._timeout, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False
