"""``make bench``: every measurement, each against a baseline of the same run; results as JSON and as a table.

    python -m bench [--only NAME ...] [--part TEXT] [--quick] [--folder DIR] [--output FILE]

Parts of 100,000,000 rows take hours and tens of GB of disk: they run only if TEXT has that number.

Sections are independent, and so are the parts of a section that has any (``tables``): each is printed and written as
soon as it is done. A section works in its own folder below DIR (default: a temporary one on the disk to be measured)
and removes it. The JSON holds the figures and the machine; docs/performance.md is written by hand from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench import (
    append_host_bench,
    backfill_bench,
    callers_bench,
    capture_bench,
    capture_engine,
    checkpoint_bench,
    client_bench,
    commit_bench,
    compaction_bench,
    coord_bench,
    coord_scale,
    flusher_bench,
    freshness_bench,
    kafka_bench,
    log_bench,
    log_server_bench,
    messaging_bench,
    msgstream_bench,
    node_bench,
    operations_bench,
    pipelines_bench,
    pulsar_bench,
    restart_bench,
    sink_bench,
    store_bench,
)
from bench.growth import parts as growth
from bench.published import commits, key_index, publishing, visible_reads
from bench.tables import reads, writes
from millrace.brokers.registry import META_STORES
from millrace.rpc.discovery import read_record

MIB = 1 << 20


def main() -> None:
    """Run the chosen sections and write what they found."""
    names = [*SECTIONS, *IN_PARTS]
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(names), help=f"of: {', '.join(names)}")
    parser.add_argument(
        "--part",
        metavar="TEXT",
        help=f"only parts with TEXT in their names; of sections with parts: {', '.join(IN_PARTS)}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and 3 pairs: to see that it runs, not to quote"
    )
    parser.add_argument(
        "--meta", choices=sorted(META_STORES), help="the meta store of the section coord (default: the embedded one)"
    )
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument(
        "--output", type=Path, default=Path("bench-results.json"), help="the JSON (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.meta:
        SECTIONS["coord"] = partial(_coord, meta=options.meta)
    console = Console(stderr=True)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="millrace-bench-", dir=options.folder))
    results: dict[str, Any] = {"machine": machine(), "quick": options.quick, "sections": {}}
    try:
        for name in options.only or names:
            folder = base / name
            folder.mkdir()
            start = time.perf_counter()
            console.print(f"[bold]{name}[/] …")
            section: dict[str, Any] = {"seconds": 0.0, "found": {}}
            results["sections"][name] = section
            for part, found in _found(name, folder, options.quick, options.part, console):
                section["seconds"] = round(time.perf_counter() - start, 1)
                section["found"] = found if part is None else {**section["found"], part: found}
                options.output.write_text(json.dumps(results, indent=1) + "\n")
                print(json.dumps({name: found if part is None else {part: found}}, indent=1), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _found(
    name: str, folder: Path, quick: bool, chosen: str | None, console: Console
) -> Iterator[tuple[str | None, Any]]:
    """Yield what a section measured, part by part as each is done: name, figures, seconds and the load before it."""
    if name not in IN_PARTS:
        yield None, plain(SECTIONS[name](folder, quick))
        return
    for part, act in IN_PARTS[name](folder, quick).items():
        if (chosen is not None and chosen not in part) or (LARGE in part and LARGE not in (chosen or "")):
            continue
        console.print(f"  {part} …")
        load, start = os.getloadavg()[0], time.perf_counter()
        found = plain(act())
        yield part, {**found, "load_before": round(load, 1), "seconds": round(time.perf_counter() - start, 1)}


def machine() -> dict[str, Any]:
    """Return what the bench ran on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "python_additions_per_s": additions_per_s(),
        "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def additions_per_s(count: int = 5_000_000) -> int:
    """Return the additions per second of a core now, which differ by a factor of two on a shared machine."""
    start, total = time.perf_counter(), 0
    for number in range(count):
        total += number
    return round(count / (time.perf_counter() - start))


def plain(value: Any) -> Any:
    """Turn dataclasses into dictionaries, recursively."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _log(folder: Path, quick: bool) -> Any:
    return log_bench.run(folder, total=(256 if quick else 4096) * MIB, count=3 if quick else 7)


def _server(folder: Path, quick: bool) -> Any:
    return {
        "latency": log_server_bench.append_latency(folder, appends=300 if quick else 2000),
        "throughput": [
            each
            for size in (1 << 10, 64 << 10)
            for each in log_server_bench.appends_and_reads(
                folder, entry_bytes=size, total=(128 if quick else 512) * MIB, runs=3 if quick else 7
            )
        ],
    }


def _append_host(folder: Path, quick: bool) -> Any:
    return {
        "single": append_host_bench.single_appends(folder / "single", count=300 if quick else 2000),
        "batched": append_host_bench.batched_appends(folder / "batched", messages=50_000 if quick else 400_000),
        "scan": append_host_bench.append_to_scan(folder / "scan", count=100 if quick else 500),
    }


def _clients(folder: Path, quick: bool) -> Any:
    total, count = (128 if quick else 1024) * MIB, 3 if quick else 7
    return {
        "frames": [
            client_bench.arrow_batches(
                folder / f"{size}-{pchannels}", row_bytes=size, total=total, count=count, pchannels=pchannels
            )
            for size, pchannels in ((1000, 2), (1000, 1), (64_000, 2))
        ],
        "small": client_bench.small_appends(folder, calls=2_000 if quick else 20_000),
        "csv": client_bench.csv_files(count=3 if quick else 5),
    }


def _node(folder: Path, quick: bool) -> Any:
    return {
        f"{size >> 10} KiB": sink_bench.node_against_sink(
            folder / str(size), message_bytes=size, total_bytes=(128 if quick else 1024) * MIB, pairs=2 if quick else 7
        )
        for size in (1 << 10, 64 << 10)
    }


def _node_on_kafka(folder: Path, quick: bool) -> Any:
    return {
        f"{size >> 10} KiB": sink_bench.node_on_kafka(
            folder / str(size), message_bytes=size, total_bytes=(128 if quick else 1024) * MIB, pairs=2 if quick else 7
        )
        for size in (1 << 10, 64 << 10)
    }


def _shares(folder: Path, quick: bool) -> Any:
    return {
        f"{size >> 10} KiB": node_bench.ranges(
            folder / str(size), message_bytes=size, total_bytes=(64 if quick else 512) * MIB, passes=2 if quick else 3
        )
        for size in (1 << 10, 64 << 10)
    }


def _flat(folder: Path, quick: bool) -> Any:
    """Cost a row as rows grow: one PChannel's range of 10^5, 10^6 and 10^7 messages of 1 KB; a smaller one warms up."""
    return {
        f"{rows:,} messages": node_bench.ranges(
            folder / str(rows), message_bytes=1 << 10, total_bytes=rows << 10, passes=1
        )
        for rows in ((10_000, 20_000, 60_000) if quick else (20_000, 100_000, 1_000_000, 10_000_000))
    }


def _backlog(folder: Path, quick: bool) -> Any:
    """Measure catching up on 10 GiB of 64 KiB messages: speed, and peak memory of driver, JVM, workers, server."""
    stop, peak = threading.Event(), [0]

    def watch() -> None:
        me = psutil.Process()
        while not stop.wait(0.5):
            total = 0
            for process in [me, *me.children(recursive=True), *_log_servers(folder)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        found = node_bench.node(folder, message_bytes=64 << 10, total_bytes=(256 if quick else 10 * 1024) * MIB)
    finally:
        stop.set()
        thread.join()
    return {**found, "peak_rss_mib": round(peak[0] / MIB)}


def _log_servers(folder: Path) -> list[psutil.Process]:
    """Return the log server of the deployment below `folder`, which is detached and so no child of this process."""
    record = read_record(folder / "log")
    try:
        return [psutil.Process(record.pid)] if record is not None else []
    except psutil.NoSuchProcess:
        return []


def _pulsar(folder: Path, quick: bool) -> Any:
    return pulsar_bench.run(folder, total=(64 if quick else 512) * MIB, count=3 if quick else 7)


def _coord(folder: Path, quick: bool, meta: str = "") -> Any:
    return {
        "meta_store": meta or "sqlite",
        "moves": coord_bench.moves(folder / "moves", rounds=1 if quick else 5, meta=meta),
        "broadcast": coord_bench.broadcast(folder / "broadcast", times=3 if quick else 20),
        "losing_nodes": coord_scale.lose_nodes(pchannels=1_000 if quick else 10_000, nodes=100 if quick else 1_000),
        "balancing": [
            coord_scale.balance_rounds(pchannels=(10 if quick else 100) * each, nodes=each, collections=500)
            for each in (32, 1_000)
        ],
        "discovery": coord_bench.discovery(folder / "discovery", times=30 if quick else 300, meta=meta),
    }


def _tables(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    base = 20_000 if quick else 500_000
    parts: dict[str, Callable[[], Any]] = {
        "appends": lambda: writes.calls(
            folder / "calls", singles=1_000 if quick else 4_000, rows=base * 2, times=1 if quick else 2
        ),
        "merge on read": lambda: reads.merge_on_read(folder / "updated", living=base // 2),
        "filtered": lambda: reads.filtered(folder / "filtered", rows=base * 2),
        "shapes": lambda: reads.shapes(folder / "shapes", wide_rows=base // 10, deep_rows=base // 5),
        "10^8 rows": lambda: writes.many(folder / "many", rows=1_000_000 if quick else 100_000_000),
    }
    counts = {1: base // 100, 100: base // 10, 10_000: base // 5 * 2}
    of = [(base, counts[10_000], 0.9, 10_000)]
    if not quick:
        of = [(base, counts[call], share, call) for call in counts for share in (0.1, 0.9)]
        # A merge's cost grows with its table, an append's does not.
        of += [(base * times, base * 2, 0.9, 10_000) for times in (10, 40, 100)]
    for living, count, share, call in of:
        name = f"until readable: {share:.0%} updates, calls of {call:,}, base of {living:,}"
        parts[name] = partial(
            writes.until_readable,
            folder / f"until-{share}-{call}-{living}",
            base=living,
            count=count,
            call=call,
            updates=share,
        )
    return parts


def _published(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    parts: dict[str, Callable[[], Any]] = {
        f"commits, {files:,} files": partial(commits.commits, folder / f"commits-{files}", files=files)
        for files in ((10, 100) if quick else (100, 1_000, 10_000))
    }
    for rows in (50_000, 200_000) if quick else (1_000_000, 10_000_000):
        parts[f"key index, {rows:,} rows"] = partial(key_index.index_of, folder / f"index-{rows}", rows=rows)
        parts[f"reads, {rows:,} rows"] = partial(visible_reads.updated, folder / f"reads-{rows}", rows=rows)
        parts[f"Spark's reads, {rows:,} rows"] = partial(visible_reads.by_spark, folder / f"spark-{rows}", rows=rows)
        parts[f"Spark's MERGE, {rows:,} rows"] = partial(publishing.spark_merge, folder / f"merge-{rows}", rows=rows)
    for rows in (50_000, 200_000) if quick else (1_000_000, 4_000_000, 10_000_000):
        parts[f"upserts, {rows:,} rows"] = partial(publishing.upserts, folder / f"upserts-{rows}", rows=rows)
    parts[f"key index, {LARGE} rows"] = partial(key_index.index_of, folder / "index-large", rows=10**8)
    parts[f"upserts, {LARGE} rows"] = partial(publishing.upserts, folder / "upserts-large", rows=10**8, baselines=False)
    count = 100 if quick else 1_000
    parts[f"ten of {count:,} collections"] = partial(publishing.many, folder / "many", collections=count)
    for interval, flush in ((10.0, 60.0), (0.0, 0.0)):
        parts[f"freshness, publish_interval {interval:g}"] = partial(
            publishing.freshness,
            folder / f"fresh-{interval:g}",
            interval=interval,
            flush=flush,
            times=4 if quick else 20,
        )
    return parts


def _streams(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    from bench.streams import (  # Bytewax is not there for each Python
        frame_sinks,
        keyed_operators,
        on_spark,
        quix,
        sinks,
    )
    from bench.streams.events import LAST, RISING

    count, size = (200_000, 50_000) if quick else (2_000_000, 200_000)
    parts: dict[str, Callable[[], Any]] = {}
    for operator, name in ((RISING, "pattern"), (LAST, "as-of join")):
        for keys in (10, 1_000_000):
            parts[f"{name} beside Bytewax, {keys:,} keys"] = partial(
                keyed_operators.compare_with_bytewax,
                operator,
                count=count,
                keys=keys,
                size=size,
                pairs=1 if quick else 3,
            )
            parts[f"{name} beside Quix Streams, {keys:,} keys"] = partial(
                quix.compare_with_quix,
                folder / f"quix-{name.split()[0]}-{keys}",
                operator,
                count=count // 10,
                keys=keys,
                size=size,
            )
    parts["state"] = partial(
        keyed_operators.state_size, count=1_000_000 if quick else 10_000_000, keys=10_000, size=50_000
    )
    parts["guarantees"] = partial(
        sinks.guarantees, folder / "sinks", rows=50_000 if quick else 500_000, size=10_000, pairs=2 if quick else 5
    )
    rows = 50_000 if quick else 200_000
    parts["guarantees under Spark"] = partial(
        frame_sinks.under_spark, folder / "frame-sinks", rows=rows, size=10_000, pairs=1 if quick else 3
    )
    parts["guarantees, Kafka"] = partial(
        frame_sinks.into_kafka, folder / "kafka-sink", rows=rows, size=10_000, pairs=2 if quick else 5
    )
    parts["changes"] = partial(
        sinks.changes, folder / "changes", rows=50_000 if quick else 500_000, size=10_000, pairs=2 if quick else 5
    )
    parts["rows source"] = partial(on_spark.source, folder / "source", times=1 if quick else 6, pairs=1 if quick else 5)
    for keys in (10, 1_000_000):
        parts[f"pattern beside transformWithState, {keys:,} keys"] = partial(
            on_spark.stateful, folder / f"stateful-{keys}", count=count, keys=keys, size=size
        )
    return parts


def _callers(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    seconds = 1.5 if quick else 8.0
    parts: dict[str, Callable[[], Any]] = {}

    def add(name: str, measure: Callable[..., Any], **arguments: Any) -> None:
        for backend in ("millrace", "kafka"):
            place = folder / f"{backend}-{name.replace(' ', '-')}"
            parts[f"{backend}, {name}"] = partial(measure, backend, place, seconds=seconds, **arguments)

    for count in (1, 16, 64):
        add(f"{count} threads", callers_bench.callers, kind="threads", count=count)
    for count in (1, 64, 512):
        add(f"{count} tasks", callers_bench.callers, kind="tasks", count=count)
    for count in (1, 16):
        add(f"{count} connections", callers_bench.callers, kind="threads", count=1, processes=count)
    for rows in (1, 100, 10_000):
        add(f"batch of {rows:,}", callers_bench.callers, kind="batch", count=rows)
    for count in (1, 10, 40):
        add(f"{count} consumers", callers_bench.consumers, count=count)
    return parts


SECTIONS: dict[str, Callable[[Path, bool], Any]] = {
    "log": _log,
    "server": _server,
    "append_host": _append_host,
    "msgstream": lambda folder, quick: msgstream_bench.run(
        folder, total=(32 if quick else 256) * MIB, count=3 if quick else 7
    ),
    "clients": _clients,
    "kafka": lambda folder, quick: kafka_bench.run(
        folder, total=(32 if quick else 256) * MIB, pairs=3 if quick else 7, singles=200 if quick else 2000
    ),
    "pulsar": _pulsar,
    "shares": _shares,
    "flat": _flat,
    "node": _node,
    "node_on_kafka": _node_on_kafka,
    "driver": lambda folder, quick: [
        node_bench.driver(folder / str(each), pchannels=each, seconds=10.0 if quick else 30.0)
        for each in ((2, 16) if quick else (2, 16, 64))
    ],
    "backlog": _backlog,
    "flusher": lambda folder, quick: flusher_bench.flusher(folder, pairs=2 if quick else 7),
    "freshness": lambda folder, quick: freshness_bench.freshness(folder, seconds=10.0 if quick else 60.0),
    "compaction": lambda folder, quick: compaction_bench.compaction(
        folder, files=200 if quick else 1000, pairs=2 if quick else 5
    ),
    "beside": lambda folder, quick: compaction_bench.freshness_during_compaction(
        folder, seconds=10.0 if quick else 60.0
    ),
    "coord": _coord,
    "backfill": lambda folder, quick: backfill_bench.backfill(folder, pairs=2 if quick else 7, times=1 if quick else 3),
    "checkpoint": lambda folder, quick: checkpoint_bench.checkpoints(
        folder, marks_mib=(64, 256) if quick else (64, 512, 4096), repeats=2 if quick else 5
    ),
    "pipelines": lambda folder, quick: pipelines_bench.run_all(
        folder, documents=20_000 if quick else 100_000, pairs=2 if quick else 5, seconds=8.0 if quick else 30.0
    ),
    "restarts": lambda folder, quick: restart_bench.restarts(
        folder, marks_mib=(64, 256) if quick else (64, 1024, 10_240), repeats=2 if quick else 5
    ),
    "operations": lambda folder, quick: operations_bench.concurrent_operations(
        folder, rows=20_000 if quick else None, slices=3 if quick else 28
    ),
    "commits": lambda folder, quick: commit_bench.commits(folder, marks=(100, 300) if quick else (1000, 20_000)),
}

LARGE = "100,000,000"

#: Sections whose parts are printed and kept one by one, and which ``--part`` chooses from.
IN_PARTS: dict[str, Callable[[Path, bool], dict[str, Callable[[], Any]]]] = {
    "callers": _callers,
    "capture": lambda folder, quick: capture_bench.parts(folder, quick) | capture_engine.parts(folder, quick),
    "growth": growth.parts,
    "messaging": messaging_bench.parts,
    "published": _published,
    "tables": _tables,
    "store": store_bench.parts,
    "streams": _streams,
}


if __name__ == "__main__":
    main()
