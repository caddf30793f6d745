"""A captured database: rows/s, CPU and lag of the engine alone, of the spool, of a collection, and of Spark's MERGE.

The same changes lie in the database's log before each measurement, and each of them continues from the same place: a
copy of the spool after the snapshot, and for PostgreSQL a copy of the slot. Rates are from the first change that
arrives to the last one, without the starts of JVMs. CPU is of this process, of its JVMs and of the log server, in
microseconds a row. Memory is the greatest of the engine's process.

The baselines run in turn with the subjects: the engine with a consumer that reads each batch and acknowledges it, and a
Spark stream whose foreachBatch takes the newest change of each key of the same changes and merges them into a Delta
table. Spark finds the changes in Parquet files, so its figures have nothing of reading the database.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import millrace.spark as face
import millrace.testing
from millrace.base.settings import Settings
from millrace.brokers.mariadb import MariaDbServer
from millrace.brokers.postgres import PostgresServer
from millrace.brokers.server import LocalServer
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.records import OPERATION
from millrace.flows.registry import feeder_of
from millrace.flows.sources.capture.engine import Batch, Engine
from millrace.flows.sources.capture.feeder import CHANGES, Database, Feeder
from millrace.flows.sources.capture.lane import CapturedRows
from millrace.flows.sources.capture.spool import Spool, Standing
from millrace.flows.sources.capture.ticks import spool_folder
from millrace.flows.sources.mariadb import table as mariadb
from millrace.flows.sources.mariadb.model import MariaDbSource
from millrace.flows.sources.postgres import server as postgres
from millrace.flows.sources.postgres.model import PostgresSource
from millrace.flows.sources.source import Limits
from millrace.pipelines.declaration import pipeline_of
from millrace.rpc.discovery import read_record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DEADLINE: Final = 900.0
_FILE_ROWS: Final = 5_000
_GROUP: Final = "millrace-bench"
_MIB: Final = 1 << 20
_FIELDS: Final = {
    "id": "int64", "customer": "int32?", "amount": "decimal(12,2)?", "state": "string?", "note": "string?",
    "at": "timestamp_ntz?",
}  # fmt: skip


def parts(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return the parts of the section."""
    rows, rounds, files = (8_000, 1, (1,)) if quick else (120_000, 3, (4, 12))
    tables, seconds = (40, 5.0) if quick else (1_000, 60.0)
    return {
        "mariadb": lambda: MariaDbCaptures(folder / "capture-mariadb", rows, files).run(rounds),
        "postgres": lambda: PostgresCaptures(folder / "capture-postgres", rows, files).run(rounds),
        f"mariadb, {tables:,} tables": lambda: MariaDbCaptures(folder / "tables-mariadb").tables(tables, seconds),
        f"postgres, {tables:,} tables": lambda: PostgresCaptures(folder / "tables-postgres").tables(tables, seconds),
    }


class Captures(ABC):
    """A server with a table, `rows` changes of it, and what captures them."""

    columns: ClassVar[str]
    schema: ClassVar[str]
    """What stands before a table's name."""
    made: ClassVar[str]
    """The columns of a new row, of `n`."""
    series: ClassVar[str]
    """Rows with the numbers from one to another, as `n`."""

    def __init__(self, folder: Path, rows: int = 0, files: tuple[int, ...] = ()) -> None:
        self._folder, self._rows, self._files = folder, rows, files
        self._settings = Settings(data_dir=folder / "data")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def run(self, rounds: int) -> dict[str, Any]:
        """Return the medians of `rounds`."""
        with self._server(self._folder / "server"):
            self._prepare()
            found: dict[str, list[dict[str, float]]] = {}
            with self._spark() as spark:
                for number in range(rounds):
                    for name, act in self._subjects(spark).items():
                        found.setdefault(name, []).append(act(self._folder / f"{name}-{number}"))
            medians = {
                name: {each: statistics.median(one[each] for one in many) for each in many[0]}
                for name, many in found.items()
            }
            best = max(value["rows_per_second"] for name, value in medians.items() if name.startswith("Spark"))
            return {
                "changes": self._rows,
                "rounds": rounds,
                **medians,
                "spool to engine": medians["spool"]["rows_per_second"] / medians["engine"]["rows_per_second"],
                "collection to Spark's best": medians["collection"]["rows_per_second"] / best,
                "lag": self._lag(),
            }

    def _subjects(self, spark: SparkSession) -> dict[str, Callable[[Path], dict[str, float]]]:
        merges = {
            f"Spark MERGE of {count * _FILE_ROWS} changes": lambda place, count=count: self._merge(spark, place, count)
            for count in self._files
        }
        return {"engine": self._engine, "spool": self._spool, "collection": self._collection, **merges}

    # --- the database ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _server(self, folder: Path) -> Any:
        """Run a server with the database `bench` while the context is open."""

    @abstractmethod
    def _execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""

    @abstractmethod
    def _declared(self, *tables: str) -> Any:
        """The source of tables."""

    @abstractmethod
    def _engine_of(self, declared: Any, standing: Standing) -> tuple[Mapping[str, str], Database]:
        """The properties of an engine that continues, and its database."""

    @contextmanager
    def _branch(self, declared: Any) -> Iterator[Any]:
        """The source of a capture that continues where the first one stands, and leaves that alone."""
        yield declared

    def _prepare(self) -> None:
        """Make the table, take its empty snapshot, and write the changes: half inserts, then updates and deletes."""
        self._execute(f"create table {self.schema}.orders ({self.columns})")
        self._orders = self._declared("orders")
        feeder = self._fed(self._orders, self._settings)
        feeder.wait_complete(_DEADLINE)
        feeder.close()
        half, step = self._rows // 2, 200
        self._execute(
            *(
                f"insert into {self.schema}.orders select {self.made}"
                f" from {self.series.format(first, first + step - 1)}"
                for first in range(0, half, step)
            )
        )
        for first in range(0, half, step):
            middle = first + step // 2
            self._execute(
                f"update {self.schema}.orders set amount = amount + 1, state = 'sent'"
                f" where id between {first} and {middle - 1}",
                f"delete from {self.schema}.orders where id between {middle} and {first + step - 1}",
            )
        self._left = half // 2

    @contextmanager
    def _continued(self, place: Path) -> Iterator[tuple[Settings, Path, Any]]:
        """The data folder and the source of a capture that has taken the snapshot and no change."""
        settings = Settings(data_dir=place / "data")
        spool = spool_folder(settings, _GROUP)
        shutil.copytree(spool_folder(self._settings, _GROUP), spool)
        with self._branch(self._orders) as declared:
            yield settings, spool, declared
        shutil.rmtree(place, ignore_errors=True)

    def _fed(self, declared: Any, settings: Settings) -> Feeder:
        feeder = feeder_of(declared, settings, group=_GROUP)
        assert isinstance(feeder, Feeder)
        return feeder

    # --- subjects ----------------------------------------------------------------------------------------------------

    def _engine(self, place: Path) -> dict[str, float]:
        """The engine, and a consumer that counts."""
        with self._continued(place) as (settings, folder, declared):
            with Spool(folder) as spool:
                now, history = spool.standing(), spool.history()
            properties, database = self._engine_of(declared, now)
            engine = Engine(
                settings, {**properties, **database.before_engine(now)}, log_file=place / "engine.log",
                tables=declared.names, partition=now.partition, offset=now.offset, history=history,
            )  # fmt: skip
            try:
                took: Took | None = None
                taken = first = 0
                while taken < self._rows:
                    frame = engine.read()
                    if not isinstance(frame, Batch):
                        continue
                    taken += sum(each.operation in CHANGES for each in frame.events)
                    engine.acknowledge()
                    if taken and took is None:
                        took, first = Took(engine.pid), taken
                assert took is not None
                return took.result(taken - first)
            finally:
                engine.close()

    def _spool(self, place: Path) -> dict[str, float]:
        """A feeder, which makes each batch durable."""
        with self._continued(place) as (settings, folder, declared):
            feeder = self._fed(declared, settings)
            try:
                with Spool(folder) as spool:
                    _wait(lambda: spool.standing().next > 0)
                    assert feeder.engine_pid is not None
                    took, first = Took(feeder.engine_pid), spool.standing().next
                    _wait(lambda: spool.standing().next >= self._rows)
                    return took.result(self._rows - first)
            finally:
                feeder.close()

    def _collection(self, place: Path) -> dict[str, float]:
        """A flow into a collection, until all rows are there; from the spool's first change on."""
        with (
            self._continued(place) as (settings, folder, declared),
            self._flow(settings, declared) as db,
            Spool(folder) as spool,
        ):
            _wait(lambda: spool.standing().next > 0)
            took, first = Took(*_children(settings)), spool.standing().next
            _wait(lambda: spool.standing().high >= self._rows)
            _wait(lambda: db["orders"].count() == self._left, 0.1)
            return took.result(self._rows - first)

    @contextmanager
    def _flow(self, settings: Settings, declared: Any) -> Iterator[Any]:
        """Run a flow into the collection `orders` of a new deployment."""
        with millrace.testing.deployment(settings.data_dir) as db:
            db.create_collection("orders", _FIELDS, key="id", vchannels=2)
            source = {**declared.model_dump(mode="json"), "password": declared.password.get_secret_value()}
            sink = {"kind": "collection", "collection": "orders"}
            flow = {"id": "bench", "source": source, "sink": sink, "errors": {"collection": "orders_errors"}}
            stop = threading.Event()
            definition = FlowRun(settings, pipeline_of(flow))
            worker = threading.Thread(target=run, args=(definition,), kwargs={"stop": stop})
            worker.start()
            try:
                yield db
            finally:
                stop.set()
                worker.join()

    def _merge(self, spark: SparkSession, place: Path, files: int) -> dict[str, float]:
        """Spark's foreachBatch MERGE; the first merge warms up and is not counted."""
        from delta.tables import DeltaTable
        from pyspark.sql import Window, functions

        inbox, target = place / "inbox", place / "table"
        inbox.mkdir(parents=True)
        changes = self._changes()
        spark.createDataFrame(
            [], "id long, customer int, amount decimal(12,2), state string, note string, at string"
        ).write.format("delta").save(str(target))
        for number in range(0, changes.num_rows, _FILE_ROWS):
            pq.write_table(changes.slice(number, _FILE_ROWS), inbox / f"{number:09}.parquet")
        ends: list[float] = []
        cpu: list[float] = []

        def merge(frame: DataFrame, _number: int) -> None:
            newest = Window.partitionBy("id").orderBy(functions.desc("number"))
            batch = frame.withColumn("place", functions.row_number().over(newest)).where("place = 1")
            (
                DeltaTable.forPath(spark, str(target)).alias("t")
                .merge(batch.alias("s"), "t.id = s.id")
                .whenMatchedDelete("s.op = 'd'")
                .whenMatchedUpdate(set={each: f"s.{each}" for each in _FIELDS})
                .whenNotMatchedInsert("s.op <> 'd'", {each: f"s.{each}" for each in _FIELDS})
                .execute()
            )  # fmt: skip
            ends.append(time.perf_counter())
            cpu.append(_cpu(_children()))

        schema = spark.read.parquet(str(inbox)).schema
        stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", files).parquet(str(inbox))
        query = (
            stream.writeStream.foreachBatch(merge)
            .option("checkpointLocation", str(place / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(int(_DEADLINE))
        query.stop()
        assert spark.read.format("delta").load(str(target)).count() == self._left
        rows = changes.num_rows - files * _FILE_ROWS
        found = {
            "rows_per_second": rows / (ends[-1] - ends[0]),
            "cpu_us_per_row": (cpu[-1] - cpu[0]) / rows * 1e6,
            "rows": float(rows),
        }
        shutil.rmtree(place, ignore_errors=True)
        return found

    def _changes(self) -> pa.Table:
        """The changes as the lane has them, one row each."""
        with self._continued(self._folder / "changes") as (settings, folder, declared):
            feeder = self._fed(declared, settings)
            feeder.wait_complete(_DEADLINE)
            feeder.close()
            (name,) = declared.names
            rows, found, start = CapturedRows(folder, name), [], 0
            with Spool(folder) as spool:
                end = spool.end_of(name, spool.standing().high)
            while start < end:
                for batch in rows.batches(start, end, Limits(10_000, 64 << 20, 0.0)):
                    start = batch.end
                    for each in batch.records or ():
                        row = {"id": int(each.key or b"0"), **(msgspec.json.decode(each.value) if each.value else {})}
                        found.append(
                            {**row, "number": each.offset, "op": (dict(each.headers)[OPERATION] or b"").decode()}
                        )
            rows.close()
        names = [*_FIELDS, "number", "op"]
        return pa.Table.from_pylist([{each: row.get(each) for each in names} for row in found])

    def _lag(self) -> dict[str, float]:
        """Seconds from a commit of one row until it is in the spool, and until the collection has it; medians."""
        place = self._folder / "lag"
        spooled, seen = [], []
        with (
            self._continued(place) as (settings, folder, declared),
            self._flow(settings, declared) as db,
            Spool(folder) as spool,
        ):
            _wait(lambda: spool.standing().high >= self._rows)
            _wait(lambda: db["orders"].count() == self._left, 0.1)
            for number in range(20):
                before = spool.standing().high
                self._execute(f"insert into {self.schema}.orders (id) values ({-number - 1})")
                begun = time.perf_counter()
                _wait(lambda: spool.standing().high > before)  # noqa: B023
                spooled.append(time.perf_counter() - begun)
                _wait(lambda: db["orders"].count() > self._left + number)  # noqa: B023
                seen.append(time.perf_counter() - begun)
                time.sleep(0.1)
        return {"spool_seconds": statistics.median(spooled), "collection_seconds": statistics.median(seen)}

    # --- many tables -------------------------------------------------------------------------------------------------

    def tables(self, count: int, seconds: float) -> dict[str, Any]:
        """Capture `count` tables: the snapshot, then 64 of them written at once, beside one of them written alone.

        The memory of the engine and of this process is given in MiB after the snapshot, after a fifth of the writes,
        and at their end.
        """
        names = [f"t{number:04}" for number in range(count)]
        written = names[:: max(1, count // 64)][:64]
        with self._server(self._folder / "server"):
            self._execute(
                *(f"create table {self.schema}.{each} ({self.columns})" for each in names),
                *(f"insert into {self.schema}.{each} (id) values (0)" for each in names),
            )
            declared = self._declared(*names)
            begun = time.perf_counter()
            feeder = self._fed(declared, self._settings)
            try:
                feeder.wait_complete(_DEADLINE)
                found: dict[str, Any] = {"tables": count, "snapshot_seconds": time.perf_counter() - begun}
                found["memory"] = {"snapshot": self._memory(feeder)}
                with Spool(spool_folder(self._settings, _GROUP)) as spool:
                    for name, several in (("one written", written[:1]), (f"{len(written)} written", written)):
                        found[name] = self._written(feeder, spool, several, seconds, found["memory"])
                    found["lag_seconds"] = statistics.median(self._spooled(spool, written))
                return found
            finally:
                feeder.close()

    def _written(
        self, feeder: Feeder, spool: Spool, names: list[str], seconds: float, memory: dict[str, Any]
    ) -> dict[str, float]:
        """Write into tables at once for a while, a transaction of 100 rows after another, until all of it is read."""
        before, begun = spool.standing().next, time.perf_counter()
        took = Took(*((feeder.engine_pid,) if feeder.engine_pid else ()))
        with ThreadPoolExecutor(8) as writers:
            round_number = 0
            while time.perf_counter() - begun < seconds:
                round_number += 1
                first = round_number * 100
                words = f"select {self.made} from {self.series.format(first, first + 99)}"
                list(
                    writers.map(lambda each: self._execute(f"insert into {self.schema}.{each} {words}"), names)  # noqa: B023
                )
                if "fifth" not in memory and time.perf_counter() - begun > seconds / 5:
                    memory["fifth"] = self._memory(feeder)
            rows = round_number * 100 * len(names)
            _wait(lambda: spool.standing().high >= before + rows)
        memory[f"{len(names)} written"] = self._memory(feeder)
        for each in names:
            self._execute(f"delete from {self.schema}.{each} where id > 0")
        _wait(lambda: spool.standing().high >= before + 2 * rows)
        found = took.result(2 * rows)
        del found["cpu_us_per_row"]  # the writers are of this process
        return found

    def _spooled(self, spool: Spool, names: list[str]) -> list[float]:
        found = []
        for number, name in enumerate(names[:20]):
            before = spool.standing().high
            self._execute(f"insert into {self.schema}.{name} (id) values ({-number - 1})")
            begun = time.perf_counter()
            _wait(lambda: spool.standing().high > before)  # noqa: B023
            found.append(time.perf_counter() - begun)
        return found

    @staticmethod
    def _memory(feeder: Feeder) -> dict[str, float]:
        assert feeder.engine_pid is not None
        engine, here = psutil.Process(feeder.engine_pid), psutil.Process()
        return {
            "engine_mib": round(engine.memory_info().rss / _MIB, 1),
            "python_mib": round(here.memory_info().rss / _MIB, 1),
        }

    @contextmanager
    def _spark(self) -> Iterator[SparkSession]:
        spark = face.session("bench-capture", settings=Settings(data_dir=self._folder / "spark"))
        try:
            yield spark
        finally:
            spark.stop()


class MariaDbCaptures(Captures):
    """By the binary log."""

    columns = (
        "id bigint primary key, customer int, amount decimal(12,2), state varchar(20), note varchar(80), at datetime(6)"
    )
    schema = "bench"
    made = "seq, seq % 1000, seq / 8, 'paid', repeat('left at the door, again', 3), now(6)"
    series = "bench.seq_{}_to_{}"

    @contextmanager
    def _server(self, folder: Path) -> Iterator[LocalServer]:
        server = MariaDbServer(folder, settings=Settings()).start()
        try:
            self._address, self._login = server.address.split(":"), server.credentials
            self._execute("create database bench")
            yield server
        finally:
            server.stop()

    def _declared(self, *tables: str) -> MariaDbSource:
        return MariaDbSource(
            host=self._address[0],
            port=int(self._address[1]),
            user=self._login.username,
            password=self._login.password,  # type: ignore[arg-type]
            database="bench",
            tables=tables,
        )

    def _execute(self, *statements: str) -> None:
        with mariadb.connected(self._declared("any")) as cursor:
            cursor.connection.autocommit(True)
            for each in statements:
                cursor.execute(each)

    def _engine_of(self, declared: MariaDbSource, standing: Standing) -> tuple[Mapping[str, str], Database]:
        return mariadb.properties_of(declared, _GROUP), mariadb.MariaDb(declared, _GROUP)


class PostgresCaptures(Captures):
    """By logical decoding."""

    columns = (
        "id bigint primary key, customer int, amount numeric(12,2), state varchar(20), note varchar(80), at timestamp"
    )
    schema = "public"
    made = "n, n % 1000, n / 8.0, 'paid', repeat('left at the door, again', 3), now()::timestamp"
    series = "generate_series({}, {}) n"
    _branches = 0

    @contextmanager
    def _server(self, folder: Path) -> Iterator[LocalServer]:
        server = PostgresServer(folder, settings=Settings()).start()
        try:
            self._port, self._login = server.port["client"], server.credentials
            self._execute("create database bench", database="postgres")
            yield server
        finally:
            server.stop()

    def _declared(self, *tables: str) -> PostgresSource:
        user, password = self._login
        return PostgresSource(
            host="127.0.0.1",
            port=self._port,
            user=user,
            password=password,  # type: ignore[arg-type]
            database="bench",
            tables=tables,
            slot="bench",
            publication="bench",
        )

    def _execute(self, *statements: str, database: str = "bench") -> None:
        import psycopg

        user, password = self._login
        with psycopg.connect(
            host="127.0.0.1", port=self._port, user=user, password=password, dbname=database, autocommit=True
        ) as db:
            for each in statements:
                if each.startswith("create table"):
                    name = each.split()[2]
                    db.execute(each)
                    each = f"alter table {name} replica identity full"
                db.execute(each)

    def _engine_of(self, declared: PostgresSource, standing: Standing) -> tuple[Mapping[str, str], Database]:
        server = postgres.Server(declared, _GROUP)
        return postgres.properties_of(declared, _GROUP, server), server

    @contextmanager
    def _branch(self, declared: PostgresSource) -> Iterator[PostgresSource]:
        PostgresCaptures._branches += 1
        slot = f"bench_{PostgresCaptures._branches}"
        self._execute(f"select pg_copy_logical_replication_slot('bench', '{slot}')")
        try:
            yield declared.model_copy(update={"slot": slot})
        finally:
            _wait(lambda: self._dropped(slot), 0.2)

    def _dropped(self, slot: str) -> bool:
        import psycopg

        try:
            self._execute(f"select pg_drop_replication_slot('{slot}')")
        except psycopg.errors.ObjectInUse:
            return False
        return True


class Took:
    """Time, CPU and memory of this process and others, from now on."""

    def __init__(self, *pids: int) -> None:
        self._pids, self._cpu = pids, _cpu(pids)
        self._begun = time.perf_counter()

    def result(self, rows: int) -> dict[str, float]:
        """Return the rates of `rows`."""
        seconds = time.perf_counter() - self._begun
        cpu = _cpu(self._pids) - self._cpu
        peak = max((_peak(each) for each in self._pids), default=0.0)
        return {
            "rows_per_second": rows / seconds,
            "cpu_us_per_row": cpu / rows * 1e6,
            "rows": float(rows),
            "largest_process_mib": peak,
        }


def _children(settings: Settings | None = None) -> tuple[int, ...]:
    """The children of this process, apart from the database; and the log server of a deployment."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        try:
            words = " ".join([each.name(), *each.cmdline()[:2]])
        except psutil.NoSuchProcess:
            continue
        if not any(name in words for name in ("mariadb", "mysqld", "postgres")):
            found.add(each.pid)
    record = None if settings is None else read_record(settings.data_dir / "log")
    return tuple(found | ({record.pid} if record is not None else set()))


def _cpu(pids: tuple[int, ...]) -> float:
    """Seconds of CPU of this process and those that run."""
    total = time.process_time()
    for each in pids:
        try:
            times = psutil.Process(each).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _peak(pid: int) -> float:
    """The greatest memory of a process so far, in MiB."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("VmHWM"))


def _wait(condition: Callable[[], bool], pause: float = 0.01) -> None:
    end = time.monotonic() + _DEADLINE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the changes do not arrive")
        time.sleep(pause)
