"""A coordinator as a program: it leads or waits as a standby, and serves people and programs over HTTP.

    python -m millrace.service [--name NAME]

Runs until SIGTERM or SIGINT; `millrace coord` starts it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing

from fastapi import FastAPI

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.access.token_file import TokenFile
from millrace.base.data_folder import prepare_data_folder
from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.leadership import LEADER_KEY
from millrace.coord.process import run_coordinator
from millrace.coord.store_factory import cluster_token, open_cluster_store
from millrace.meta.store import MetaStore
from millrace.observe.cluster import ClusterReader
from millrace.observe.observer import Observer
from millrace.runtime.process_setup import set_up_service
from millrace.service.application import RouteGroup, add_health, build_app, core_routes
from millrace.service.authentication import Authenticator, token_authenticator
from millrace.service.server import serving


def main() -> int:
    """Coordinate until a signal arrives; return 1 if the meta store cannot be opened or the port is in use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--name", default=f"{socket.gethostname()}-{os.getpid()}", help="its name in `millrace balance`"
    )
    name = parser.parse_args().name
    stop = set_up_service()
    try:
        settings = Settings.load()
        prepare_data_folder(settings.data_dir)
        clock = SystemClock()
        door = token_authenticator([cluster_token(settings)], TokenFile(settings.data_dir))
        with (
            open_cluster_store(settings, clock) as store,
            closing(Observer(settings)) as observer,
            ClusterReader(settings, clock) as look,
            serving(_application(core_routes(observer, look), door, store), settings) as address,
        ):
            run_coordinator(settings, store, name=name, address=address, stop=stop, clock=clock)
    except MillraceError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    return 0


def _application(parts: Sequence[RouteGroup], door: Authenticator, store: MetaStore) -> FastAPI:
    app = build_app(parts, door)

    def is_ready() -> bool:
        try:
            store.get(LEADER_KEY)
        except MillraceError:
            return False
        return True

    add_health(app, "millrace-coordinator", is_ready)
    return app


if __name__ == "__main__":
    sys.exit(main())
