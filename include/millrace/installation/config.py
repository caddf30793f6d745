"""The folders, the address and the environment of an installation. Starts nothing.

airflow.cfg, in the checkout or where the wheel put it, is Airflow's configuration. What differs between installations
(secrets, address, state folder, the mark of the processes) overrides it as environment. Other `AIRFLOW__*` variables of
the caller stay as they are.
"""

from __future__ import annotations

import configparser
import errno
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from millrace.base.errors import InvalidSettings
from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.installation.processes import MARK_VARIABLE
from millrace.installation.secrets import Secrets
from millrace.runtime.launch.command import home_folder

STANDALONE: Final = (sys.executable, "-m", "millrace_airflow.standalone")
COMPONENT_COUNT: Final = 4
"""Child processes of `airflow standalone`: scheduler, triggerer, DAG processor, API server."""


class BindAddress(NamedTuple):
    """The address on which Airflow's API server listens."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """The URL as seen from this machine."""
        return f"http://{'127.0.0.1' if self.host in _ANY else self.host}:{self.port}"


_ANY: Final = ("0.0.0.0", "::", "")

_QUIET_PORTS: Final = range(20_000, 32_768)
"""Ports below the range from which Linux hands out ephemeral ports.

Airflow listens on the chosen ports only 15 s later; no other process must get them in the meantime.
"""

_TRIES: Final = 100


def airflow_root() -> Path:
    """Return the folder with airflow.cfg, dags/, plugins/ and jobs/. Raises InvalidSettings if it is missing."""
    root = home_folder()
    if not (root / "airflow.cfg").is_file():
        raise InvalidSettings(f"{root} has no airflow.cfg: set MILLRACE_HOME to a checkout of Millrace")
    return root


def airflow_home(settings: Settings) -> Path:
    """Return AIRFLOW_HOME for a data folder: Airflow's database, logs and secrets."""
    return settings.data_dir.resolve() / "airflow"


def checked_airflow_home(settings: Settings, *, root: Path) -> Path:
    """Return AIRFLOW_HOME. Raises InvalidSettings if it is inside `root`."""
    state = airflow_home(settings)
    if state.is_relative_to(root.resolve()):
        raise InvalidSettings(
            f"the data folder {settings.data_dir} lies in {root}, and secrets do not belong there:"
            " choose another one (MILLRACE_DATA, or --data)"
        )
    return state


def choose_bind_address(root: Path, *, port: int | None, env: Mapping[str, str]) -> BindAddress:
    """Choose host and port: `port`, else AIRFLOW__API__* of `env`, else [api] in airflow.cfg. Port 0 takes a free one.

    Raises InvalidSettings if the port is invalid or taken.
    """
    config = configparser.ConfigParser(interpolation=None)
    config.read(root / "airflow.cfg", encoding="utf-8")
    host = str(env.get("AIRFLOW__API__HOST") or config.get("api", "host", fallback="127.0.0.1"))
    named = str(env.get("AIRFLOW__API__PORT") or config.get("api", "port", fallback="8080"))
    if port is None and not (named.isascii() and named.isdigit() and int(named) < 1 << 16):
        raise InvalidSettings(f"[api] port = {named!r}: give a number from 0 to 65535")
    return BindAddress(host, free_port(host, int(named) if port is None else port))


def free_port(host: str, port: int, *, exclude: Sequence[int] = ()) -> int:
    """Return `port` if it is free on `host`; for 0 return a free port that is not in `exclude`.

    Raises InvalidSettings if the port is taken, or none is free.
    """
    if port:
        _listen(host, port)
        return port
    for candidate in random.sample(_QUIET_PORTS, _TRIES):
        if candidate not in exclude:
            with suppress(InvalidSettings):
                _listen(host, candidate)
                return candidate
    _listen(host, 0)  # raises if nothing can listen on this host at all
    raise InvalidSettings(
        f"none of {_TRIES} ports between {_QUIET_PORTS[0]} and {_QUIET_PORTS[-1]} is free: choose one with --port"
    )


def _listen(host: str, port: int) -> None:
    """Bind `port` and release it. Raises InvalidSettings if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise InvalidSettings(f"cannot listen on [api] host = {host!r}: {error.strerror}") from None
            taken = "is taken by another process" if error.errno == errno.EADDRINUSE else "needs more rights than yours"
            raise InvalidSettings(
                f"port {port} on {host or 'this machine'} {taken}: choose another one with --port"
                " (--port 0 takes a free one), or set [api] port in airflow.cfg or AIRFLOW__API__PORT"
            ) from None


def airflow_environment(
    settings: Settings, secrets: Secrets, *, root: Path, state: Path, bind: BindAddress | None, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the installation's processes.

    Without `bind`: the environment of a command beside the running Airflow.
    """
    package = str(ROOT)
    own = [package, str(root / "plugins")]  # the auth manager is imported before Airflow adds its plugins' folder
    paths = [*own, *(part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part not in own)]
    found = {
        **env,
        **settings.environment(),
        **secrets.environment(state),
        MARK_VARIABLE: str(settings.data_dir.resolve()),
        "MILLRACE_HOME": str(root),
        "AIRFLOW_CONFIG": str(root / "airflow.cfg"),
        "AIRFLOW_HOME": str(state),
        "PYTHONPATH": os.pathsep.join(paths),
        # `airflow standalone` starts its components as `airflow`: make that this Python's.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)]),
        # Airflow sets process titles; without SPT_NOENV they would overwrite the environment, and the mark in it.
        "SPT_NOENV": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if bind is not None:
        found |= {"AIRFLOW__API__HOST": bind.host, "AIRFLOW__API__PORT": str(bind.port)}
        found.setdefault("AIRFLOW__API__BASE_URL", bind.address)
        # Airflow also starts two log servers; each installation on this machine needs ports of its own for them.
        worker = free_port("", 0, exclude=[bind.port])
        trigger = free_port("", 0, exclude=[bind.port, worker])
        found.setdefault("AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT", str(worker))
        found.setdefault("AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT", str(trigger))
    if found.get("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "sqlite").startswith("sqlite"):
        for name in ("SQL_ALCHEMY_CONNECT_ARGS", "SQL_ALCHEMY_CONNECT_ARGS_ASYNC"):
            found.setdefault(f"AIRFLOW__DATABASE__{name}", "millrace_airflow.sqlite.CONNECT_ARGS")
    return found
