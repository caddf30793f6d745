"""Settings: read and checked once at the edge, then passed inward as one frozen value.

Precedence: defaults < the ``[millrace]`` table of a file (TOML, or INI such as airflow.cfg) < ``MILLRACE_*`` in the
environment < live settings that were changed since (millrace.base.settings.live). An unknown name or an invalid value
raises InvalidSettings with the name and the reason. Nothing is guessed, and no other code reads settings later. The
settings that the chain decides by are not here: they enter the log as messages (docs/chain.md).
"""

from __future__ import annotations

import configparser
import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from millrace.base.data_folder import check_data_folder
from millrace.base.errors import InvalidSettings, UnsupportedVersion
from millrace.base.log_backends import EMBEDDED
from millrace.base.package import VERSION
from millrace.base.settings.place import await_open_place, check_place, placed, read_place
from millrace.base.settings.value import SettingSpec, check, parse, setting

PREFIX: Final = "MILLRACE_"

RESERVED: Final = frozenset(
    {
        "MILLRACE_CONFIG",
        "MILLRACE_HOME",
        "MILLRACE_FLOW_FOLDER",
        "MILLRACE_RUN_FOLDER",
        "MILLRACE_TASK_FOLDER",
        "MILLRACE_TASK_DRIVER",
        "MILLRACE_INSTALLATION",
        "MILLRACE_METRICS_TOKEN",
        "MILLRACE_PIPELINES",
        "MILLRACE_SERVER_TOKEN",
        "MILLRACE_LOG_USERNAME",
        "MILLRACE_LOG_PASSWORD",
        "MILLRACE_LOG_TOKEN",
        "MILLRACE_META_USERNAME",
        "MILLRACE_META_PASSWORD",
        "MILLRACE_PIPELINE_KEYS",
        "MILLRACE_PIPELINE_KEYS_REQUIRED",
    }
)
"""``MILLRACE_*`` variables that are not settings.

They name the settings file, the checkout (airflow.cfg finds its folders by it), a launched job's folder, the folder of
tasks on another machine, the installation that a process belongs to and the pipeline service, and say that a pod keeps
no keys of pipelines' secrets. The others are secrets,
which no file and no listing shows: the tokens for metrics and for the log, the logins of brokers and of the meta store,
and the keys that encrypt pipelines' secrets.
"""

TEST_PREFIX: Final = "MILLRACE_TEST_"
"""The prefix of variables for tests and the benchmark; never settings."""

_TABLES: Final = re.compile(r"|(?:/|[a-z][a-z0-9+.-]*://).*[^/]")
_SPARK_MASTER: Final = re.compile(r"|(spark|k8s)://\S+|yarn")
_PLACES: Final = re.compile(r"|(/|[a-z0-9]+://)[^:]*(:(/|[a-z0-9]+://)[^:]*)*")
_ARCHIVE: Final = re.compile(r"|(?:/|[a-z][a-z0-9+.-]*://)\S+\.(?:tar\.gz|tgz)")
_FILE: Final = re.compile(r"|/.*[^/]")
_FOLDERS: Final = re.compile(r"|/[^:]*(:/[^:]*)*")
_MEMORY: Final = re.compile(r"\d+[mg]")
_META_STORE: Final = re.compile(
    r"|sqlite:////\S+|mariadb://[^/@?\s]+/\w+|etcds?://[^/@?\s]+(/[\w./-]*)?(\?ca=/[^&\s]+)?", re.ASCII
)
_POLICY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NODE: Final = re.compile(r"|[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _user_folders(env: Mapping[str, str]) -> dict[str, Path]:
    """Return the default data and cache folders. A relative XDG value is ignored, as the XDG specification asks."""
    home = Path(env.get("HOME") or Path.home())
    data, cache = Path(env.get("XDG_DATA_HOME", "")), Path(env.get("XDG_CACHE_HOME", ""))
    return {
        "data_dir": (data if data.is_absolute() else home / ".local/share") / "millrace",
        "cache_dir": (cache if cache.is_absolute() else home / ".cache") / "millrace",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of Millrace. Sizes are bytes, times are seconds. Derived paths are properties."""

    data_dir: Path = setting(None, "The data folder: log, tables and checkpoints.", env="MILLRACE_DATA")
    tables: str = setting(
        "",
        "Location of the tables: a folder or an object-store URI; empty: the data folder.",
        pattern=_TABLES,
        allowed="empty, or an absolute path or URI without a trailing /",
    )
    cache_dir: Path = setting(None, "The cache: files that can be fetched again (Spark's jars).", env="MILLRACE_CACHE")

    log: str = setting(
        EMBEDDED,
        "The ingress log: embedded, or on brokers (docs/brokers.md).",
    )
    log_host: str = setting("127.0.0.1", "Address that this host's servers bind to.")
    log_port: int = setting(0, "Port of the embedded log's server; 0: any free port.", low=0, high=65535)
    log_idle_seconds: float = setting(
        300.0,
        "Idle time after which the log's server stops, if it serves only this host on a free port; 0: never.",
        low=0,
        high=31_536_000,
    )
    log_tls_cert: str = setting("", "Certificate chain (PEM) of the log's server; empty: no TLS.")
    log_tls_key: str = setting("", "Key (PEM) of that certificate.")
    log_tls_name: str = setting("localhost", "A name in that certificate, which clients on this host verify.")
    log_connections: int = setting(512, "Maximum connections of the log's server.", low=8, high=65536)
    log_streams: int = setting(256, "Maximum concurrent append streams of the log's server.", low=4, high=65536)
    access_log_sample: float = setting(
        0.01, "Share of reads and appends that have a line in the access log (docs/access.md).", low=0, high=1
    )
    access_log_bytes: int = setting(
        16 << 20, "Size of one file of the access log.", low=4 << 10, high=4 << 30, is_bytes=True
    )
    access_log_files: int = setting(
        8, "Files of the access log that are kept, the current one included.", low=1, high=1000
    )
    log_file_bytes: int = setting(
        64 << 20, "Size of one file of the embedded log.", low=1 << 20, high=4 << 30, is_bytes=True
    )
    log_retention_bytes: int = setting(
        0,
        "Log bytes of a PChannel to keep after the tables hold them durably; 0: all.",
        low=0,
        high=1 << 50,
        is_bytes=True,
    )
    log_retention_seconds: float = setting(
        0.0,
        "Time to keep log entries after the tables hold them durably; 0: for ever.",
        low=0,
        high=3_153_600_000,
    )
    log_clock_leap: float = setting(
        300.0,
        "Largest forward jump of the wall clock that the embedded log follows; 0: no limit.",
        low=0,
        high=31_536_000,
    )
    pchannels: int = setting(2, "PChannels of a new deployment.", low=1, high=1024)
    max_entry_bytes: int = setting(16 << 20, "Maximum size of a log entry.", low=1 << 10, high=1 << 30, is_bytes=True)

    append_attempts: int = setting(3, "Attempts of an append before its error is raised.", low=1, high=1000)
    append_retry_delay: float = setting(1.0, "Delay between two attempts of an append.", low=0, high=3600)
    append_deadline: float = setting(30.0, "Timeout for an append's result.", low=0.001, high=86400)

    max_bytes_per_trigger: int = setting(
        256 << 20,
        "Maximum log bytes of a PChannel in one micro-batch.",
        low=1 << 10,
        high=16 << 30,
        is_bytes=True,
        live=True,
    )
    trigger_interval: float = setting(
        0.0, "Minimum time between micro-batches of the streaming node; 0: no delay.", low=0, high=86400
    )
    wal_linger: float = setting(
        3.0,
        "Longest time that few new rows wait for more before `wal` takes them; 0: not at all. A read, a stream or any"
        " message but rows ends the wait.",
        low=0,
        high=3600,
    )
    flush_interval: float = setting(
        60.0,
        "Longest time that rows wait for the flusher; reads take them from the WAL meanwhile. If collections are"
        " published, `publish_interval` counts where it is shorter.",
        low=0,
        high=86400,
        live=True,
    )
    flush_bytes: int = setting(
        16 << 20,
        "WAL bytes of a PChannel at which the flusher takes them before that.",
        low=0,
        high=16 << 30,
        is_bytes=True,
        live=True,
    )
    publish: bool = setting(True, "Publish each collection as a plain Delta table (docs/published-tables.md).")
    publish_interval: float = setting(
        10.0,
        "About the longest time from an append to the published version that has it; 0: publish after each flush.",
        low=0,
        high=86400,
        live=True,
    )
    publish_change_feed: bool = setting(
        False,
        "Let Spark read the changes of published tables (`readChangeFeed`). delta-rs 1.6 then reads wrong changes.",
    )
    publish_partition: bool = setting(
        False, "Add the column `_partition`, the name of a row's partition, to published tables."
    )
    tick_interval: float = setting(10.0, "Idle time after which a PChannel gets a time tick.", low=0.01, high=3600)

    start_deadline: float = setting(120.0, "Timeout for the start of a Millrace process.", low=1, high=86400)
    stop_deadline: float = setting(30.0, "Timeout for a clean stop before the process is killed.", low=0.1, high=86400)
    read_deadline: float = setting(30.0, "Timeout of a read for its time tick.", low=0.001, high=86400)

    flow_memory_slow: float = setting(
        0.9,
        "Fraction of this host's memory in use above which appends are throttled; 0: off.",
        low=0,
        high=1,
        live=True,
    )
    flow_memory_reject: float = setting(
        0.97, "Fraction of this host's memory in use above which appends are rejected.", low=0, high=1, live=True
    )
    flow_disk_slow: int = setting(
        2 << 30,
        "Free disk space below which Millrace frees log space and throttles appends; 0: off.",
        low=0,
        high=1 << 50,
        is_bytes=True,
        live=True,
    )
    flow_disk_reject: int = setting(
        512 << 20, "Free disk space below which appends are rejected.", low=0, high=1 << 50, is_bytes=True, live=True
    )
    flow_lag_slow: float = setting(
        0.0, "Flusher lag above which appends are throttled; 0: off.", low=0, high=31_536_000, live=True
    )
    flow_lag_reject: float = setting(
        0.0, "Flusher lag above which appends are rejected.", low=0, high=31_536_000, live=True
    )
    flow_start_rate: int = setting(
        64 << 20,
        "Append rate, in bytes per second, at which throttling starts.",
        low=1 << 10,
        high=1 << 40,
        is_bytes=True,
        live=True,
    )
    flow_least_rate: int = setting(
        256 << 10,
        "Minimum append rate, in bytes per second, under throttling.",
        low=1 << 10,
        high=1 << 40,
        is_bytes=True,
        live=True,
    )

    node: str = setting(
        "",
        "Name of this node in a cluster; empty: a single node with all PChannels.",
        pattern=_NODE,
        allowed="empty, or letters, digits and ._- (at most 63)",
    )
    meta_store: str = setting(
        "",
        "URL of the cluster's meta store; empty: SQLite in the data folder.",
        pattern=_META_STORE,
        allowed="empty, sqlite:////path, mariadb://host:port/database or etcd://host:port[,…][/prefix]",
    )
    session_seconds: float = setting(
        10.0, "Session timeout of a node or leading coordinator before others take over.", low=1, high=300
    )
    service_port: int = setting(0, "Port of a coordinator's HTTP service; 0: any free port.", low=0, high=65535)
    balance_policy: str = setting(
        "vchannelfair",
        "How PChannels are spread over nodes: vchannelfair, pchannelcount, or a policy of another package"
        " (docs/coordinator.md).",
        pattern=_POLICY,
        allowed="a name of letters, digits and ._-",
        live=True,
    )
    balance_interval: float = setting(
        300.0, "Minimum time between two moves of a PChannel for balance only.", low=0, high=86400, live=True
    )
    balance_lag: float = setting(
        1.0, "Maximum lag of a PChannel that moves for balance only.", low=0, high=86400, live=True
    )

    backfill_parallel: int = setting(2, "Slices of a backfill rebuilt in parallel.", low=1, high=64)
    derived_modules: str = setting("", "Modules with your derived tables, separated by commas.")
    flow_declarations: str = setting("", "Modules and YAML files that declare flows, separated by commas.")
    stream_declarations: str = setting("", "Earlier name of flow_declarations; both are read.")
    pipeline_config: str = setting(
        "", "A pipeline-config.yaml with defaults for pipelines, read by their service and Airflow's web server."
    )

    history_hours: float = setting(
        168.0,
        "Guaranteed reach of reads at a time tick, in hours; compaction folds in older deletes.",
        low=0,
        high=876000,
    )

    wal_retention: float = setting(
        0.0,
        "Time to keep WAL rows after the collections hold them, verified; 0: for ever.",
        low=0,
        high=3_153_600_000,
    )
    airflow_retention_days: float = setting(
        30.0, "Days that Airflow's runs, tasks, events and task logs are kept; 0: for ever.", low=0, high=36_500
    )
    run_retention_days: float = setting(
        30.0,
        "Days that folders of ended runs (at most 200) and records of ended restores and nodes are kept; 0: no limit.",
        low=0,
        high=36_500,
    )
    quality_retention_days: float = setting(
        30.0, "Days that results of quality checks and their pages are kept; 0: for ever.", low=0, high=36_500
    )
    file_retention: float = setting(
        600.0,
        "Time to keep a table's file after a commit replaced it, for tasks and for readers without a pin (Spark and"
        " other engines that read the tables themselves).",
        low=60,
        high=31_536_000,
    )
    publish_retention: float = setting(
        3600.0,
        "Time to keep the files of a published table's version after the next one replaced it, for readers of other"
        " engines.",
        low=0,
        high=31_536_000,
    )
    quality_dir: str = setting("", "Folder of your expectation suites; empty: quality in the data folder.")

    load_roots: str = setting(
        "",
        "Folders that loads started through Airflow may read, separated by colons; empty: inbox in the data folder.",
        pattern=_FOLDERS,
        allowed="absolute paths, separated by colons",
    )

    backup_dir: str = setting("", "Folder or URI (s3://…) for backups; if set, the DAG backup creates one a day.")

    backup_roots: str = setting(
        "",
        "Further folders or URIs, separated by colons, that backups started through Airflow may use.",
        pattern=_PLACES,
        allowed="absolute paths and URIs of object stores, separated by colons",
    )

    move_roots: str = setting(
        "",
        "Folders or URIs, separated by colons, that moves of the tables started through Airflow may use.",
        pattern=_PLACES,
        allowed="absolute paths and URIs of object stores, separated by colons",
    )

    metrics_port: int = setting(0, "Port of the metrics endpoint; 0: none.", low=0, high=65535)

    spark_master: str = setting(
        "",
        "Spark master for jobs, in client mode; empty: Spark runs in the job's process.",
        pattern=_SPARK_MASTER,
        allowed="empty, spark://host:port, k8s://... or yarn",
    )
    spark_environment: str = setting(
        "",
        "Packed Python environment for executors whose machines share no folder with this one: path or URI of a"
        " .tar.gz (make environment). Empty: they have this environment at the same path, and the data folder.",
        pattern=_ARCHIVE,
        allowed="empty, or the absolute path or URI of a .tar.gz",
    )
    spark_properties: str = setting(
        "",
        "File of further Spark properties, in the form of spark-defaults.conf; empty: none.",
        pattern=_FILE,
        allowed="empty, or an absolute path",
    )
    spark_cores: int = setting(
        0, "Cores of a Spark driver, or of its executors together; 0: all that this process may use.", low=0, high=1024
    )
    spark_memory: str = setting(
        "1g", "Heap of a Spark driver.", pattern=_MEMORY, allowed="a number with m or g, such as 800m or 2g"
    )
    operations_at_once: int = setting(
        0, "Operations that may run Spark at once; others wait their turn. 0: one per two cores.", low=0, high=1024
    )
    spark_ui: bool = setting(False, "Serve Spark's web interface.")
    ivy_settings: str = setting("", "Ivy settings file to fetch Spark's jars from your own repository.")

    def __post_init__(self) -> None:
        for name, folder in _user_folders(os.environ).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, folder)
        for spec in _SPECS.values():
            check(spec, getattr(self, spec.name), spec.env)
        if bool(self.log_tls_cert) != bool(self.log_tls_key):
            raise InvalidSettings("set both MILLRACE_LOG_TLS_CERT and MILLRACE_LOG_TLS_KEY, or neither")

    @classmethod
    def load(cls, *, env: Mapping[str, str] | None = None, file: Path | str | None = None) -> Self:
        """Load settings from `file` (default: the file in ``MILLRACE_CONFIG``, if set) and `env` (default: this
        process's).

        Raises InvalidSettings, with the variable or key and the allowed values, or with the reason why the data folder
        is invalid.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = dict(_user_folders(env))
        named = "the data folder"
        source = file if file is not None else env.get("MILLRACE_CONFIG") or None
        if source is not None:
            path = Path(source)
            for key, raw in read_settings_file(path).items():
                where = f"{path.name}: [millrace] {key}"
                if key not in _SPECS:
                    raise InvalidSettings(f"{where} is not a setting{_closest(key, _SPECS)}")
                values[key] = parse(_SPECS[key], raw, where)
                named = where if key == "data_dir" else named
        by_env = {spec.env: spec for spec in _SPECS.values()}
        for variable in sorted(env):
            if not variable.startswith(PREFIX) or variable in RESERVED or variable.startswith(TEST_PREFIX):
                continue
            if variable not in by_env:
                raise InvalidSettings(f"{variable} is not a setting{_closest(variable, by_env)}")
            spec = by_env[variable]
            values[spec.name] = parse(spec, env[variable], variable)
            named = variable if spec.name == "data_dir" else named
        check_data_folder(values["data_dir"], named)
        values["tables"] = placed(values["data_dir"], values.get("tables", ""))
        return cls(**values)

    @classmethod
    def load_for_writing(cls) -> Self:
        """Load settings of this process, once no move holds the tables closed. Raises as `load`, and TablesMoved."""
        await_open_place(cls.load().data_dir)
        return cls.load()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_task, (VERSION, self._values())

    def environment(self) -> dict[str, str]:
        """Return these settings as ``MILLRACE_*`` variables, for child processes."""
        values = self._values()
        return {spec.env: str(values[spec.name]) for spec in _SPECS.values()}

    def _values(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in _SPECS.values()} | {"tables": self.tables_place}

    @property
    def tables_place(self) -> str:
        """The setting `tables` as it counts now: other than the field only for :func:`following` settings."""
        return self.tables

    @property
    def log_tls(self) -> tuple[str, str, str] | None:
        """Certificate, key and name of the log's server; None without TLS."""
        return (self.log_tls_cert, self.log_tls_key, self.log_tls_name) if self.log_tls_cert else None

    @property
    def log_path(self) -> Path:
        """The folder of the embedded log."""
        return self.data_dir / "log"

    @property
    def tables_uri(self) -> str:
        """The location of all tables."""
        return self.tables_place or str(self.data_dir)

    def check_place(self) -> None:
        """Raise TablesMoved if the tables were moved since these settings were loaded, or are being moved."""
        check_place(self.data_dir, self.tables)

    def table_uri(self, name: str) -> str:
        """Return the location of the table `name`."""
        return f"{self.tables_uri}/{name}"

    def with_data_dir(self, data_dir: Path) -> Self:
        """Return these settings with another data folder, which also holds the tables."""
        return dataclasses.replace(self, data_dir=data_dir, tables="")

    @property
    def pins_uri(self) -> str:
        """The pins of readers and tasks that use old versions of the tables (millrace.storage.pins)."""
        return self.table_uri("pins")

    @property
    def wal_uri(self) -> str:
        """The ``wal`` Delta table."""
        return self.table_uri("wal")

    @property
    def segments_uri(self) -> str:
        """The ``segments`` Delta table."""
        return self.table_uri("segments")

    @property
    def checkpoints_uri(self) -> str:
        """The ``checkpoints`` Delta table."""
        return self.table_uri("checkpoints")

    def deletes_uri(self, collection_id: int) -> str:
        """Return the Delta table with the deletes of one collection."""
        return self.table_uri(f"deletes/{collection_id}")

    def key_index_path(self, collection_id: int) -> Path:
        """Return the folder of the key index of a collection's rows, which is always on this machine."""
        return self.data_dir / f"tables/{collection_id}/_index"

    @property
    def staged_uri(self) -> str:
        """The location of the staged files that Import messages name."""
        return self.table_uri("staged")

    @property
    def staged_path(self) -> Path:
        """The folder of staged files in the data folder, where earlier builds kept them wherever the tables were."""
        return self.data_dir / "staged"

    @property
    def parked_path(self) -> Path:
        """The folder of the parked PChannels (millrace.node.range_loop.parking)."""
        return self.data_dir / "parked"

    def progress_path(self, query: str) -> Path:
        """Return the progress file of a streaming query, rewritten after each of its micro-batches."""
        return self.node_run_path / f"{query}.json"

    @property
    def access_log_path(self) -> Path:
        """The current file of this process's access log."""
        return self.data_dir / "access" / "log" / f"{self.node or 'server'}.jsonl"

    def spark_checkpoint_path(self, name: str) -> Path:
        """Return Spark's own checkpoint of the streaming query `name`: a hint that may be deleted, never the truth."""
        return self.data_dir / "spark" / (f"{name}@{self.node}" if self.node else name)

    @property
    def run_path(self) -> Path:
        """The folder in which running processes publish their addresses and locks."""
        return self.data_dir / "run"

    @property
    def wal_readers_path(self) -> Path:
        """The file that readers touch while they follow the ``wal`` table (millrace.tables.wal.reader)."""
        return self.run_path / "wal-readers"

    @property
    def node_run_path(self) -> Path:
        """The folder for one node's own reports (progress, heartbeat); with a single node, :attr:`run_path`."""
        return self.run_path / "nodes" / self.node if self.node else self.run_path

    @property
    def cores(self) -> int:
        """The cores of a Spark driver, with 0 resolved to the cores that this process may use."""
        return self.spark_cores or len(os.sched_getaffinity(0))

    @property
    def spark_slots(self) -> int:
        """The number of operations that may run Spark at once."""
        return self.operations_at_once or max(1, self.cores // 2)


class _Following(Settings):
    """Settings whose tables are where the file of the data folder says at the moment."""

    __slots__ = ()

    @property
    def tables_place(self) -> str:
        # Without the check of `placed`: what was loaded stays valid, also once the old place was removed.
        place = read_place(self.data_dir)
        return self.tables if place is None else place.uri


def following(settings: Settings) -> Settings:
    """Return `settings` for a process that reads tables for long: its table URIs follow a move of the tables."""
    return _Following(**{spec.name: getattr(settings, spec.name) for spec in _SPECS.values()})


def follows(settings: Settings) -> bool:
    """Return whether these are settings that :func:`following` made."""
    return isinstance(settings, _Following)


TASK_FOLDER: Final = "MILLRACE_TASK_FOLDER"
"""Set on executors that do not share the driver's data folder: where their tasks have one."""


TASK_DRIVER: Final = "MILLRACE_TASK_DRIVER"
"""Set in the driver of such executors, whose own Python workers plan: they have its data folder."""


def _of_task(version: str, values: dict[str, Any]) -> Settings:
    """Restore pickled settings: with the driver's data folder, or a folder of this process where that is not shared."""
    if not in_executor_folder():
        return Settings(**values)
    if version != VERSION:
        raise UnsupportedVersion(
            f"the driver is Millrace {version}, the executors' environment has {VERSION}: pack it again"
            " (make environment)"
        )
    folder = Path(os.environ[TASK_FOLDER]).absolute()
    return Settings(**values | {"data_dir": folder / str(os.getpid())})


def in_executor_folder() -> bool:
    """Return whether this is a task of an executor that does not share the driver's data folder."""
    return bool(os.environ.get(TASK_FOLDER)) and not os.environ.get(TASK_DRIVER)


def settings_of_executor(settings: Settings) -> Settings:
    """Return `settings` for what all tasks of an executor have in common, and a next process of them finds again.

    Of a task that shares the driver's data folder, they are `settings`. Else the data folder is the executor's, and a
    log server there serves its tasks alone: it ends soon after them.
    """
    if not in_executor_folder():
        return settings
    folder = Path(os.environ[TASK_FOLDER]).absolute() / "shared"
    alone: dict[str, Any] = {"log_host": "127.0.0.1", "log_port": 0, "log_idle_seconds": 60.0}
    alone |= {"log_tls_cert": "", "log_tls_key": "", "metrics_port": 0}
    return dataclasses.replace(settings, data_dir=folder, **alone)


_SPECS: Final[dict[str, SettingSpec]] = {
    item.name: SettingSpec(
        item.name, item.metadata["env"] or PREFIX + item.name.upper(), str(item.type), item.default, item.metadata
    )
    for item in dataclasses.fields(Settings)
}

LIVE: Final = frozenset(spec.name for spec in _SPECS.values() if spec.metadata["live"])
"""The settings that may change while Millrace runs (millrace.base.settings.live)."""

_DEFAULTS_IN_WORDS: Final = {
    "data_dir": "${XDG_DATA_HOME:-~/.local/share}/millrace",
    "cache_dir": "${XDG_CACHE_HOME:-~/.cache}/millrace",
}


def describe() -> list[tuple[str, str, str, str]]:
    """Return (name, environment variable, default, description) of every setting, in declaration order."""
    return [
        (spec.name, spec.env, _DEFAULTS_IN_WORDS.get(spec.name, str(spec.default)), spec.metadata["words"])
        for spec in _SPECS.values()
    ]


def parse_setting(name: str, text: str) -> Any:
    """Parse the value of a setting. Raises InvalidSettings, also for an unknown name."""
    if name not in _SPECS:
        raise InvalidSettings(f"{name} is not a setting{_closest(name, _SPECS)}")
    return parse(_SPECS[name], text, name)


def non_default_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by name, without the data and cache folders of this
    machine.
    """
    return {
        name: value
        for name, spec in _SPECS.items()
        if name not in _DEFAULTS_IN_WORDS and (value := getattr(settings, name)) != spec.default
    }


def _closest(name: str, names: Mapping[str, SettingSpec]) -> str:
    found = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else f"; settings are {', '.join(sorted(names))}"


def read_settings_file(path: Path) -> Mapping[str, Any]:
    """Return the ``[millrace]`` table of a TOML or INI file; the suffix decides the format.

    Raises InvalidSettings if the file cannot be read, is malformed, or has other tables but no ``[millrace]``: its
    lines would be silently ignored.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidSettings(f"the settings file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidSettings(
            f"the settings file {path} is not UTF-8 at byte {error.start}: save it as UTF-8"
        ) from error
    except ValueError as error:
        raise InvalidSettings(f"the settings file {str(path)!r} cannot be read: {error}") from error
    try:
        if path.suffix == ".toml":
            document = tomllib.loads(text)
            table = document.get("millrace", {})
            if not isinstance(table, dict):
                raise InvalidSettings(f"{path.name}: millrace must be a table, [millrace]")
            _require_table("millrace" in document, path, document)
            return table
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        _require_table(parser.has_section("millrace"), path, parser.sections())
        return dict(parser["millrace"]) if parser.has_section("millrace") else {}
    except (tomllib.TOMLDecodeError, configparser.Error) as error:
        raise InvalidSettings(f"the settings file {path.name} is malformed: {error}") from error


def _require_table(found: bool, path: Path, others: Iterable[str]) -> None:
    """Reject a file that holds `others` but not our table."""
    if not found and (named := list(others)):
        shown = ", ".join(named[:5])
        raise InvalidSettings(
            f"{path.name} has no table [millrace], only {shown}: put the settings under a line [millrace], such as"
            " [millrace] and then pchannels = 4"
        )
