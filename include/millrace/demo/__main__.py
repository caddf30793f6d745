"""``make run``: the whole system on one machine, fed with a year of flights, and a verified summary.

Starts the log and a Spark driver with the streaming node and the flusher. Several producers replay the flights of 2013
in about a minute, then send them many times at full speed. The demo waits until every row is in its collection and
compares the producers' results with the log, the WAL and the tables. A second run continues in the same folder.

The setting `log` chooses the log: the embedded one, or brokers. ``--log kafka`` (``make run LOG=kafka``) starts a
broker on this host, in a subfolder of the data folder, unless the setting names one of that kind already. It stops with
the demo.

``--nodes 3`` (``make run NODES=3``) runs a coordinator and that many nodes. While rows stream, one node is killed, one
is suspended beyond its lease and resumed, one is drained and one is added. The coordinator, and each server that the
demo started, is killed and started again.

``--store s3`` (``make run STORE=s3``) puts the tables into an object store, a versitygw that runs beside the demo, and
compares them at the end with tables that the same log gives on a disk.

``--cluster 2`` (``make run STORE=s3 CLUSTER=2``) runs the tasks of the first node on a Spark master with two workers,
which use no folder of the demo. The log is Kafka, the meta store etcd and the nodes are three unless other options say
so. Each process is killed once.

``--pipeline`` (``make run PIPELINE=1``) sends the flights from a Kafka topic into OpenSearch instead, through a
pipeline that its service stores in MariaDB, and runs a search.

``--streams`` (``make run STREAMS=1``) runs three streaming queries over the flights while they are fed, and compares
each result with DuckDB's.

``--capture`` (``make run CDC=1``) writes to a MariaDB and a PostgreSQL in transactions, kills readers, engines,
databases and the log server meanwhile, and compares the collections that capture them with their tables.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from millrace.base.data_folder import restrict_umask, unknown_entries
from millrace.base.errors import InvalidSettings, LogUnavailable, MillraceError
from millrace.base.log_backends import EMBEDDED, is_in_data_folder
from millrace.base.settings import Settings
from millrace.brokers.programs import install
from millrace.brokers.registry import LOG_BROKERS, META_STORES, OBJECT_STORES, create_server
from millrace.client.database import Database
from millrace.demo.cluster_faults import (
    MIN_NODES,
    DemoServers,
    demo_servers,
    faulty_cluster,
    with_short_intervals,
)
from millrace.demo.engines import ENGINES
from millrace.demo.flights import flights
from millrace.demo.load import ensure_collection
from millrace.demo.load_phases import (
    add_load_options,
    check_load_options,
    demo_client,
    run_load_phases,
    stopping_on_signals,
)
from millrace.demo.object_store import equal_on_disk, running_store
from millrace.demo.spark_cluster import running_spark
from millrace.demo.summary import JOB, DemoInterrupted, LoadMonitor, summarise
from millrace.installation.config import airflow_home
from millrace.installation.keeper import read_record
from millrace.rpc.remote_log import RemoteLogService
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.queries import started_path
from millrace.tables.wal.table import WalTable

ROOT = Path(__file__).parents[3]
BROKERS = "brokers"
"""Subfolder of the data folder for the brokers that the demo starts."""


def main() -> int:
    """Run the demo. The exit code is 0 if everything that was appended is accounted for."""
    options = _options()
    restrict_umask()
    console = Console(highlight=False)
    with stopping_on_signals() as stop:
        try:
            settings = Settings.load()
            _refuse_beside_the_system(settings)
            if options.fresh:
                _start_afresh(settings, console)
            if options.pipeline:
                from millrace.demo.pipeline import run_pipeline

                return run_pipeline(settings, options.rows, console, stop)
            if options.streams:
                from millrace.demo.streaming.run import run_streams

                return run_streams(
                    settings, ROOT, rows=options.rows, seconds=options.seconds, console=console, stop=stop
                )
            if options.capture:
                from millrace.demo.capture.run import run_capture

                return run_capture(
                    settings, ROOT, rows=options.rows, seconds=options.seconds, console=console, stop=stop
                )
            with (
                demo_servers() as servers,
                running_log(settings, options.log, servers, console) as settings,
                running_meta_store(settings, options.meta, servers, console) as settings,
                running_store(settings, options.store, servers, console) as settings,
                running_spark(settings, options.cluster, ROOT, servers, console) as settings,
            ):
                if options.nodes:
                    return _run_cluster(settings, options, servers, console, stop)
                return _run(settings, options, console, stop)
        except DemoInterrupted:
            console.print(
                "\nStopped. Everything that was acknowledged is in the log; [bold]make run[/] continues from there."
            )
            return 130
        except MillraceError as error:
            console.print(f"[bold red]{error.code}[/]: {escape(str(error))}")
            return 1


def _refuse_beside_the_system(settings: Settings) -> None:
    """Raise InvalidSettings if the whole system runs on the data folder, which takes only one streaming node."""
    record = read_record(airflow_home(settings))
    if record is not None and record.process() is not None:
        raise InvalidSettings(
            f"the whole system runs on {settings.data_dir} ({record.address}): send the flights through it with"
            " `make demo`, or stop it with `make down`"
        )


@contextmanager
def running_log(settings: Settings, kind: str, servers: DemoServers, console: Console) -> Iterator[Settings]:
    """Yield the settings with the log of `kind` ("": unchanged); run a broker meanwhile if they name none."""
    named = settings.log.partition("://")[0]
    folder = settings.data_dir / BROKERS
    started = [name for name in LOG_BROKERS if (folder / name).exists()]
    kind = kind or named
    if kind == named and not (is_in_data_folder(kind) and started):
        yield settings
        return
    if not is_in_data_folder(settings.log):
        raise InvalidSettings(f"LOG={kind}, but MILLRACE_LOG is {settings.log}: choose one of them")
    if WalTable.exists(settings.wal_uri) and kind not in started:
        raise InvalidSettings(
            f"{settings.data_dir} uses the log {started[0] if started else EMBEDDED}: continue with"
            f" LOG={started[0] if started else EMBEDDED}, start over with ARGS=--fresh, or choose another MILLRACE_DATA"
        )
    console.print(f"Starting {kind} on this host …")
    with servers.added(create_server(kind, folder / kind, settings=settings)) as running:
        console.print(f"Log: [bold]{running.url}[/]")
        yield replace(settings, log=running.url)


@contextmanager
def running_meta_store(settings: Settings, kind: str, servers: DemoServers, console: Console) -> Iterator[Settings]:
    """Yield the settings with a meta store of `kind` ("": unchanged); run its server meanwhile."""
    if not kind:
        yield settings
        return
    if settings.meta_store:
        raise InvalidSettings(f"META={kind}, but MILLRACE_META_STORE is {settings.meta_store}: choose one of them")
    install([kind])
    console.print(f"Starting {kind} on this host …")
    with servers.added(create_server(kind, settings.data_dir / BROKERS / kind, settings=settings)) as running:
        console.print(f"Meta store: [bold]{running.url}[/]")
        os.environ.update(running.client_environment)  # for child processes
        yield replace(settings, meta_store=running.url)


def _run(settings: Settings, options: argparse.Namespace, console: Console, stop: threading.Event) -> int:
    console.print(f"Data folder: [bold]{settings.data_dir}[/]")
    log_file = settings.run_path / "streaming-node.log"
    with demo_client(settings) as client:
        client.catalog.ensure_pchannels(settings.pchannels)
        collection = ensure_collection(client)
        table = flights().slice(0, options.rows)
        console.print(f"Log and append host are up; starting Spark with node and flusher (log: {log_file}) …")
        watch = LoadMonitor(settings, client, stop)
        started_path(settings, JOB).unlink(missing_ok=True)  # an earlier run's
        job = ChildProcess(
            [sys.executable, str(ROOT / "jobs" / "streaming_node.py"), "--with-flusher"],
            log_file=log_file,
            env=settings.environment(),
        )
        try:
            watch.wait_started(job)
            load = run_load_phases(client, collection, table, watch, job, console, options)
        finally:
            job.stop(deadline=settings.stop_deadline)
        same = [_on_disk(settings, client, console)] if settings.tables else []
        return summarise(
            settings, client, collection, load.counts, watch, console, engines=options.engines, checks=same
        )


def _run_cluster(
    settings: Settings, options: argparse.Namespace, servers: DemoServers, console: Console, stop: threading.Event
) -> int:
    settings = with_short_intervals(settings)
    console.print(f"Data folder: [bold]{settings.data_dir}[/]")
    with demo_client(settings) as client:
        pchannels = max(settings.pchannels, 2 * options.nodes)
        client.catalog.ensure_pchannels(pchannels)
        collection = ensure_collection(client, vchannels=pchannels)
        table = flights().slice(0, options.rows)
        console.print(
            f"Log and append host are up; starting a coordinator and {options.nodes} nodes (logs: {settings.run_path})"
            " …"
        )
        watch = LoadMonitor(settings, client, stop)
        job = ROOT / "jobs" / "streaming_node.py"
        with faulty_cluster(settings, options.nodes, job, servers, console) as cluster:
            cluster.start_nodes(watch, pchannels=len(client.log.names()))
            cluster.start()
            over = cluster.over
            load = run_load_phases(client, collection, table, watch, cluster, console, options, over=over)
            cluster.wait_finished()
        cluster.print_moves()
        same = [_on_disk(settings, client, console)] if settings.tables else []
        return summarise(
            settings, client, collection, load.counts, watch, console, engines=options.engines, checks=same
        )


def _on_disk(settings: Settings, client: Database, console: Console) -> tuple[str, bool]:
    console.print("Writing the log to tables on a disk too, and comparing …")
    return "the same log gives equal tables on a disk (digest)", equal_on_disk(settings, client.log)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--log", choices=sorted((EMBEDDED, *LOG_BROKERS)), default="", help="the log (default: MILLRACE_LOG)"
    )
    parser.add_argument("--fresh", action="store_true", help="remove the data folder first (default: continue in it)")
    parser.add_argument("--nodes", type=int, default=0, help=f"run a cluster of this many nodes (at least {MIN_NODES})")
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="run a pipeline from Kafka to OpenSearch, with its service and MariaDB",
    )
    parser.add_argument(
        "--streams", action="store_true", help="run streaming queries over the flights and compare them with DuckDB"
    )
    parser.add_argument(
        "--capture", action="store_true", help="capture databases that are written to, through kills of every process"
    )
    parser.add_argument(
        "--meta",
        choices=sorted(META_STORES),
        default="",
        help="the cluster's meta store (default: MILLRACE_META_STORE)",
    )
    parser.add_argument(
        "--store", choices=sorted(OBJECT_STORES), default="", help="put the tables into an object store of this host"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=ENGINES, help="who reads the published table (default: all)"
    )
    parser.add_argument(
        "--cluster", type=int, default=0, metavar="WORKERS", help="run Spark's tasks on a master with so many workers"
    )
    add_load_options(parser)
    options = parser.parse_args()
    if options.cluster:
        options.log, options.store = options.log or "kafka", options.store or "s3"
        options.meta, options.nodes = options.meta or "etcd", options.nodes or MIN_NODES
    check_load_options(parser, options)
    if options.meta and not options.nodes:
        parser.error("--meta needs a cluster: pass --nodes as well")
    if options.store and (options.pipeline or options.streams or options.capture):
        parser.error("--store is for the flights, alone or with --log, --nodes and --meta")
    if options.cluster < 0 or (options.cluster and options.log == EMBEDDED):
        parser.error("--cluster needs a number of workers, and a log on brokers")
    if options.nodes and options.nodes < MIN_NODES:
        parser.error(f"--nodes must be at least {MIN_NODES}: one node is killed while another is suspended")
    return options


def _start_afresh(settings: Settings, console: Console) -> None:
    """Remove the files of an earlier run, and nothing that is not Millrace's."""
    folder = settings.data_dir
    if not folder.exists():
        return
    found = unknown_entries(folder)
    if found:
        raise SystemExit(
            f"{folder} contains {', '.join(found[:5])}, which is not Millrace's: remove it yourself, or choose another"
            " MILLRACE_DATA"
        )
    _stop_server(settings)
    shutil.rmtree(folder)
    console.print(f"Removed {folder}.")


def _stop_server(settings: Settings) -> None:
    """Stop the log server of this data folder, if one runs."""
    try:
        service = RemoteLogService.connect(settings.log_path, start=False, deadline=settings.stop_deadline)
    except LogUnavailable:
        return
    service.shutdown()
    service.close()


if __name__ == "__main__":
    sys.exit(main())
