"""Find the Java that Spark 4.2 needs (17 or 21), or install it if this user may. Uses the standard library only.

``python -m millrace.runtime.java`` is what `make java` runs, before anything is installed: it prints the Java home.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidSettings
from millrace.runtime.debian import apt_installer

SUPPORTED: Final = (17, 21)
PACKAGES: Final = tuple(f"openjdk-{version}-jre-headless" for version in SUPPORTED)
JVM_FOLDER: Final = Path("/usr/lib/jvm")

_VERSION: Final = re.compile(r'^(?:JAVA_VERSION="?|.*\bversion ")(\d+)', re.MULTILINE)


def java_version(home: Path) -> int | None:
    """Return the major version of the Java in `home`, from its ``release`` file or its output; None without Java."""
    binary = home / "bin" / "java"
    if not os.access(binary, os.X_OK):
        return None
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = _VERSION.search(text)
    if match is None:
        try:
            answer = subprocess.run([binary, "-version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        match = _VERSION.search(answer.stderr)
    return int(match[1]) if match else None


def _candidates(env: Mapping[str, str], jvm_folder: Path) -> Iterator[Path]:
    if env.get("JAVA_HOME"):
        yield Path(env["JAVA_HOME"])
    on_path = shutil.which("java", path=env.get("PATH", ""))
    if on_path:
        yield Path(on_path).resolve().parent.parent
    if jvm_folder.is_dir():
        yield from sorted(jvm_folder.iterdir())


def find_java(*, env: Mapping[str, str] | None = None, jvm_folder: Path = JVM_FOLDER) -> Path:
    """Return the home of a supported Java: from JAVA_HOME, then PATH, then the system's folder of JVMs.

    Raises InvalidSettings, which says what to install, if there is none.
    """
    seen = set()
    for home in _candidates(os.environ if env is None else env, jvm_folder):
        version = java_version(home)
        if version in SUPPORTED:
            return home
        if version is not None:
            seen.add(version)
    found = f" (found only {', '.join(map(str, sorted(seen)))})" if seen else ""
    raise InvalidSettings(
        f"Millrace needs Java 17 or 21{found}: install it (Debian, Ubuntu: `sudo apt-get install {PACKAGES[0]}`;"
        " Fedora: `sudo dnf install java-21-openjdk-headless`) or point JAVA_HOME to one."
    )


def install_java(*, timeout: float = 600) -> bool:
    """Install a supported Java with apt-get, as root or with a passwordless sudo, and return whether that worked.

    An installed package keeps its version: other programs may be running on it.
    """
    apt = apt_installer(timeout=timeout)
    if apt is None:
        return False
    apt.update()
    return any(apt.install(package) for package in PACKAGES)


def main() -> int:
    """Print a Java home and install Java first if necessary. Exit code 1, with one sentence, if that fails."""
    try:
        print(find_java())
    except InvalidSettings:
        print("Java 17 or 21 not found; trying to install it.", file=sys.stderr)
        install_java()
        try:
            print(find_java())
        except InvalidSettings as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
