"""Servers that are system programs, from Debian's packages: found, or installed if this user may install them.

``python -m millrace.brokers.programs etcd mariadb postgres`` is what `make servers` runs. It installs only what is
missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidSettings
from millrace.runtime.debian import apt_installer

PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "etcd": ("etcd-server",),
    "mariadb": ("mariadb-server-core", "mariadb-client-core"),
    "postgres": ("postgresql",),
}
"""Debian's packages of each server.

MariaDB's core packages start no service. If the package of etcd or PostgreSQL starts one, it listens on other ports
than ours.
"""
PROGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "etcd": ("etcd",),
    "mariadb": ("mariadbd", "mariadb-install-db"),
    "postgres": ("postgres", "initdb"),
}
"""The programs that each server needs from them."""

_SYSTEM: Final = "/usr/local/sbin:/usr/sbin:/sbin"
"""Folders with servers that a user's PATH may lack."""
_POSTGRES: Final = Path("/usr/lib/postgresql")
"""Where Debian installs each version of PostgreSQL, on no PATH."""


def find_program(server: str, name: str) -> str:
    """Return the path of the program `name` of `server`. Raises InvalidSettings that says what to install."""
    found = _find(name)
    if found is None:
        packages = " ".join(PACKAGES[server])
        raise InvalidSettings(
            f"{server} cannot start: the program {name} is missing. Run `make servers`, or install it (Debian, Ubuntu:"
            f" `sudo apt-get install --no-install-recommends {packages}`; other systems: put {name} on the PATH)"
        )
    return found


def _find(name: str) -> str | None:
    versions = sorted(_POSTGRES.glob("*/bin"), key=lambda each: (len(each.parent.name), each.parent.name), reverse=True)
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), _SYSTEM, *map(str, versions))))


def install(servers: list[str]) -> None:
    """Install what `servers` lack. Does nothing if everything is present. Raises InvalidSettings."""
    missing = [server for server in servers if not all(map(_find, PROGRAMS[server]))]
    if missing and (apt := apt_installer()) is not None:
        apt.update()
        apt.install(*(package for server in missing for package in PACKAGES[server]))
    for server in missing:
        for name in PROGRAMS[server]:
            find_program(server, name)


def main() -> int:
    """Install the servers named as arguments. Return 1, with a message, if one is missing and cannot be installed."""
    try:
        install(sys.argv[1:] or sorted(PROGRAMS))
    except InvalidSettings as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
