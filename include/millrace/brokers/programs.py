"""Servers that are programs: found, installed from Debian's packages if this user may, or built by Go.

``python -m millrace.brokers.programs etcd mariadb postgres`` is what `make servers` runs. It installs only what is
missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, InvalidSettings
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder
from millrace.base.settings import Settings
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

_BUILD_SECONDS: Final = 900.0
_SYSTEM: Final = "/usr/local/sbin:/usr/sbin:/sbin"
"""Folders with servers that a user's PATH may lack."""
_POSTGRES: Final = Path("/usr/lib/postgresql")
"""Folders of Debian's PostgreSQL versions, which are not on the PATH."""


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


def build_program(settings: Settings, module: str, version: str, *, purpose: tuple[str, str]) -> Path:
    """Return the program of a Go `module` in the cache folder; build it first if it is not there, which takes minutes.

    Go checks what it fetches against its checksum database. `purpose` (what needs it, and what to do instead) is for
    the message. Raises InvalidSettings without Go or if the build fails, DeadlineExceeded.
    """
    name = module.rsplit("/", 1)[-1]
    folder = settings.cache_dir / "programs" / f"{name}-{version}"
    program = folder / name
    if program.is_file():
        return program
    end = Deadline.after(_BUILD_SECONDS)
    make_folder(folder)
    busy = DeadlineExceeded(f"another process builds {program}; try again")
    with exclusive_lock(folder / ".lock", deadline=end, busy=busy):
        if not program.is_file():
            _build(folder, name, f"{module}@{version}", end, purpose)
    return program


def _build(folder: Path, name: str, module: str, end: Deadline, purpose: tuple[str, str]) -> None:
    go = shutil.which("go")
    if go is None:
        what, instead = purpose
        raise InvalidSettings(
            f"{what} is built with Go, and there is no `go` on the PATH: install it (Debian, Ubuntu:"
            f" `sudo apt-get install golang`), or {instead}"
        )
    draft = folder / "draft"
    make_folder(draft)
    environment = {**os.environ, "GOBIN": str(draft.absolute())}
    command = [go, "install", module]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=end.remaining(minimum=1.0), check=False
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"building {name} took too long: is Go's module proxy reachable?") from None
    if done.returncode != 0:
        raise InvalidSettings(f"{name} could not be built: {done.stderr[-2000:]}")
    (draft / name).replace(folder / name)


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
