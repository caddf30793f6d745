"""The pipeline service as a program: its routes at a port of its own, and its pipelines kept as people asked for them.

    python -m millrace.service.pipelines [--config pipeline-config.yaml]

Runs until SIGTERM or SIGINT; `millrace pipelines serve` starts it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final

import millrace.runtime.arrow_start  # noqa: F401 - first, before an array is made
from millrace.access.token_file import TokenFile
from millrace.base.data_folder import claim
from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.coord.opening import cluster_token
from millrace.pipelines.api.management import Management
from millrace.pipelines.api.routes import CALLS, router
from millrace.pipelines.model.configuration import Configuration
from millrace.pipelines.store.store import open_pipelines
from millrace.runtime.service import begin_service
from millrace.service.access import token_door
from millrace.service.application import Part, application
from millrace.service.faults import ANSWERS
from millrace.service.server import serving

TEND_SECONDS: Final = 5.0
_log: Final = logging.getLogger(__name__)


def pipelines_part(management: Management) -> Part:
    """The routes of pipelines, for whoever serves the application."""
    return Part(router(management, ANSWERS), CALLS, partial(management.admit, CALLS))


def tend(management: Management, stop: Event) -> None:
    """Keep pipelines as they were asked to be, until `stop`."""
    while not stop.is_set():
        try:
            management.tend()
        except MillraceError as error:
            _log.warning("%s: %s", error.code, error)
        stop.wait(TEND_SECONDS)


def main() -> int:
    """Serve until a signal comes; 1 where the store cannot be opened, or the port is taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a pipeline-config.yaml")
    options = parser.parse_args()
    stop = begin_service()
    try:
        settings = Settings.load()
        claim(settings.data_dir)
        configuration = Configuration.load(options.config) if options.config else Configuration()
        door = token_door([cluster_token(settings)], TokenFile(settings.data_dir))
        at_port = replace(settings, service_port=settings.service_port or configuration.server.httpPort)
        with open_pipelines(settings) as store:
            management = Management(settings, store, configuration=configuration)
            with serving(application([pipelines_part(management)], door), at_port):
                tend(management, stop)
    except MillraceError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
