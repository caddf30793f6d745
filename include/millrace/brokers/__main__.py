"""``python -m millrace.brokers kafka --data <folder>``: run a broker in the foreground until SIGTERM or SIGINT.

The first line of output is the URL for the setting `log` (etcd, mariadb: `meta_store`; postgres: of its database; s3:
`tables`; its keys are in the folder's file `environment.sh`). With
``--sasl``, clients need the user and the generated password from the folder's file `password`: pass them as
MILLRACE_LOG_USERNAME and MILLRACE_LOG_PASSWORD.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.registry import (
    CAPTURED_SERVERS,
    LOG_BROKERS,
    META_STORES,
    OBJECT_STORES,
    SINK_SERVERS,
    create_server,
)
from millrace.brokers.server import LocalServer
from millrace.runtime.process_setup import stop_on_signals


def main() -> int:
    """Run the server. Return 0 after a requested stop, 1 if it could not start or ended on its own."""
    parser = argparse.ArgumentParser(prog="python -m millrace.brokers", description=__doc__.splitlines()[0])
    known = LOG_BROKERS | META_STORES | SINK_SERVERS | CAPTURED_SERVERS | OBJECT_STORES
    parser.add_argument("broker", choices=sorted(known))
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder for its data and ports")
    parser.add_argument("--sasl", action="store_true", help="(kafka) require SASL/PLAIN with a generated password")
    options = parser.parse_args()
    if options.sasl and options.broker != "kafka":
        parser.error("--sasl is for kafka")
    stop = stop_on_signals()
    try:
        with _chosen(options) as running:
            sys.stdout.write(f"{running.url}\n")
            sys.stdout.flush()
            while not stop.wait(0.2):
                if not running.running():
                    sys.stderr.write(f"{options.broker} ended on its own:\n{running.tail()}\n")
                    return 1
    except MillraceError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    return 0


def _chosen(options: argparse.Namespace) -> LocalServer:
    settings = Settings.load()
    if options.sasl:
        return KafkaBroker(options.data, settings=settings, sasl=True)
    return create_server(options.broker, options.data, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
