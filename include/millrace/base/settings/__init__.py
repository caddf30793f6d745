"""Settings: read once at the edge, checked there, and handed inward as one frozen value.

Precedence: defaults < the ``[millrace]`` table of a file (TOML, or an INI file such as airflow.cfg) < ``MILLRACE_*`` in
the environment. A name that is not known, or a value that is not allowed, is InvalidSettings and says which and why;
nothing is guessed and nothing is read later from anywhere else. What the chain decides by is not here: it enters the log
as a message (docs/chain.md).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from millrace.base.data_folder import check_data_folder
from millrace.base.errors import InvalidSettings
from millrace.base.log_backends import EMBEDDED
from millrace.base.settings.file import read_settings_file
from millrace.base.settings.value import SettingSpec, check, parse, setting

PREFIX: Final = "MILLRACE_"

RESERVED: Final = frozenset(
    {
        "MILLRACE_CONFIG",
        "MILLRACE_HOME",
        "MILLRACE_RUN_FOLDER",
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
    }
)
"""Not settings: the settings file to read, the checkout (airflow.cfg finds its folders by it), a launched job's folder, the
installation that a process belongs to, where the pipeline service is, and secrets, which no file and no listing has: the tokens that read the metrics and that
reach the log, what logs in to its brokers, and the keys that pipelines' secrets are encrypted with."""

TEST_PREFIX: Final = "MILLRACE_TEST_"
"""Names that tests and the benchmark keep for themselves; never settings."""

_TABLES: Final = re.compile(r"|(?:/|[a-z][a-z0-9+.-]*://).*[^/]")
_SPARK_MASTER: Final = re.compile(r"|(spark|k8s)://\S+|yarn")
_FOLDERS: Final = re.compile(r"|/[^:]*(:/[^:]*)*")
_MEMORY: Final = re.compile(r"\d+[mg]")
_META_STORE: Final = re.compile(
    r"|sqlite:////\S+|mariadb://[^/@?\s]+/\w+|etcds?://[^/@?\s]+(/[\w./-]*)?(\?ca=/[^&\s]+)?", re.ASCII
)
_NODE: Final = re.compile(r"|[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _user_folders(env: Mapping[str, str]) -> dict[str, Path]:
    """Where data and cache go by default; a relative XDG value is ignored, as the XDG specification asks."""
    home = Path(env.get("HOME") or Path.home())
    data, cache = Path(env.get("XDG_DATA_HOME", "")), Path(env.get("XDG_CACHE_HOME", ""))
    return {
        "data_dir": (data if data.is_absolute() else home / ".local/share") / "millrace",
        "cache_dir": (cache if cache.is_absolute() else home / ".cache") / "millrace",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of Millrace. Sizes are bytes, times are seconds. Derived places are properties."""

    data_dir: Path = setting(None, "Where log, tables and checkpoints live.", env="MILLRACE_DATA")
    tables: str = setting(
        "",
        "Where the tables lie, if not in the data folder: a folder, or the URI of a store.",
        pattern=_TABLES,
        allowed="nothing, an absolute path or a URI, without a / at its end",
    )
    cache_dir: Path = setting(None, "What can be fetched again (Spark's jars).", env="MILLRACE_CACHE")

    log: str = setting(
        EMBEDDED,
        "The ingress log: embedded, or on brokers (docs/brokers.md).",
    )
    log_host: str = setting("127.0.0.1", "Address that the servers of this host bind.")
    log_port: int = setting(0, "Port of the embedded log's server; 0 takes a free one.", low=0, high=65535)
    log_idle_seconds: float = setting(
        300.0,
        "Time without a client after which the log's server ends, if it serves this host at a free port; 0: never.",
        low=0,
        high=31_536_000,
    )
    log_tls_cert: str = setting("", "Certificate chain (PEM) of the log's server; empty: no TLS.")
    log_tls_key: str = setting("", "Key (PEM) of that certificate.")
    log_tls_name: str = setting("localhost", "A name in that certificate, which clients on this host look for.")
    log_connections: int = setting(512, "Connections that the log's server takes.", low=8, high=65536)
    log_streams: int = setting(256, "Streams of appends that the log's server serves at once.", low=4, high=65536)
    log_file_bytes: int = setting(
        64 << 20, "Size of one file of the embedded log.", low=1 << 20, high=4 << 30, is_bytes=True
    )
    log_retention_bytes: int = setting(
        0,
        "What the embedded log keeps of a PChannel that the tables hold durably; 0 keeps all of it.",
        low=0,
        high=1 << 50,
        is_bytes=True,
    )
    log_retention_seconds: float = setting(
        0.0,
        "Time that the embedded log keeps what the tables hold durably; 0 keeps all of it.",
        low=0,
        high=3_153_600_000,
    )
    log_clock_leap: float = setting(
        300.0,
        "How far the wall clock may leap ahead and be believed by the embedded log; 0: however far.",
        low=0,
        high=31_536_000,
    )
    pchannels: int = setting(2, "PChannels that a new deployment gets.", low=1, high=1024)
    max_entry_bytes: int = setting(
        16 << 20, "Largest log entry that is taken.", low=1 << 10, high=1 << 30, is_bytes=True
    )

    append_attempts: int = setting(3, "Attempts of one append before its error is the caller's.", low=1, high=1000)
    append_retry_delay: float = setting(1.0, "Pause between two attempts of an append.", low=0, high=3600)
    append_deadline: float = setting(30.0, "Longest wait for an append's result.", low=0.001, high=86400)

    max_bytes_per_trigger: int = setting(
        256 << 20, "Log bytes that one micro-batch takes from a PChannel.", low=1 << 10, high=16 << 30, is_bytes=True
    )
    trigger_interval: float = setting(
        0.0, "Least time between two micro-batches of the streaming node; 0 runs on.", low=0, high=86400
    )
    flush_interval: float = setting(
        2.0,
        "Least time between two micro-batches of the flusher; reads see the WAL's tail meanwhile.",
        low=0,
        high=86400,
    )
    tick_interval: float = setting(10.0, "Pause after which an idle PChannel gets a time tick.", low=0.01, high=3600)

    start_deadline: float = setting(120.0, "Longest wait for a process of ours to come up.", low=1, high=86400)
    stop_deadline: float = setting(30.0, "Longest wait for a clean stop before a kill.", low=0.1, high=86400)
    read_deadline: float = setting(30.0, "Longest wait of a read for its time tick.", low=0.001, high=86400)

    flow_memory_slow: float = setting(
        0.9, "Part of this host's memory in use above which appends are slowed; 0 does not look at it.", low=0, high=1
    )
    flow_memory_reject: float = setting(
        0.97, "Part of this host's memory in use above which appends are refused.", low=0, high=1
    )
    flow_disk_slow: int = setting(
        2 << 30,
        "Free space of the data folder's disk below which it is relieved and appends are slowed; 0 does not look at it.",
        low=0,
        high=1 << 50,
        is_bytes=True,
    )
    flow_disk_reject: int = setting(
        512 << 20, "Free space below which appends are refused.", low=0, high=1 << 50, is_bytes=True
    )
    flow_lag_slow: float = setting(
        0.0,
        "Wait of a row for the flusher above which appends are slowed; 0 does not look at it.",
        low=0,
        high=31_536_000,
    )
    flow_lag_reject: float = setting(
        0.0, "Wait of a row for the flusher above which appends are refused.", low=0, high=31_536_000
    )
    flow_start_rate: int = setting(
        64 << 20, "Bytes a second at which a slowdown starts.", low=1 << 10, high=1 << 40, is_bytes=True
    )
    flow_least_rate: int = setting(
        256 << 10, "Bytes a second that a slowdown leaves at least.", low=1 << 10, high=1 << 40, is_bytes=True
    )

    node: str = setting(
        "",
        "Name of this node in a cluster; empty: the one node, which has all PChannels.",
        pattern=_NODE,
        allowed="nothing, or letters, digits and ._- (at most 63)",
    )
    meta_store: str = setting(
        "",
        "URL of the cluster's meta store; empty: SQLite in the data folder.",
        pattern=_META_STORE,
        allowed="nothing, sqlite:////path, mariadb://host:port/database or etcd://host:port[,…][/prefix]",
    )
    session_seconds: float = setting(
        10.0, "How long a node, or the leading coordinator, may be silent before others take over.", low=1, high=300
    )
    service_port: int = setting(0, "Port of a coordinator's HTTP service; 0 takes a free one.", low=0, high=65535)
    balance_interval: float = setting(
        300.0, "Least time between two moves of a PChannel for balance alone.", low=0, high=86400
    )
    balance_lag: float = setting(
        1.0, "Seconds that a PChannel may be behind its log and still move for balance alone.", low=0, high=86400
    )

    backfill_parallel: int = setting(2, "Slices of a backfill that are rebuilt at once.", low=1, high=64)
    derived_modules: str = setting("", "Modules with derived tables of your own, separated by commas.")
    stream_declarations: str = setting(
        "", "Modules with STREAMS and YAML files of declared streams, separated by commas."
    )
    pipeline_config: str = setting(
        "", "A pipeline-config.yaml with the defaults of pipelines, for their service and for Airflow's web server."
    )

    history_hours: float = setting(
        168.0,
        "Hours back that reads at a time tick reach for certain; compaction folds in older deletes.",
        low=0,
        high=876000,
    )

    wal_retention: float = setting(
        0.0,
        "Time that the WAL keeps rows which the collections hold, verified; 0 keeps all.",
        low=0,
        high=3_153_600_000,
    )
    quality_dir: str = setting("", "Folder of your own expectation suites; empty: quality in the data folder.")

    load_roots: str = setting(
        "",
        "Folders that loads started through Airflow may read, separated by colons; empty: inbox in the data folder.",
        pattern=_FOLDERS,
        allowed="absolute paths, separated by colons",
    )

    backup_dir: str = setting("", "Folder that backups go to; set, the DAG backup makes one a day.")

    backup_roots: str = setting(
        "",
        "Further folders, separated by colons, that a backup started through Airflow may be told to go to.",
        pattern=_FOLDERS,
        allowed="absolute paths, separated by colons",
    )

    metrics_port: int = setting(0, "Port of the metrics endpoint; 0 serves none.", low=0, high=65535)

    spark_master: str = setting(
        "",
        "Master that jobs submit to, in client mode; empty runs Spark in the job's own process.",
        pattern=_SPARK_MASTER,
        allowed="nothing, spark://host:port, k8s://... or yarn",
    )
    spark_cores: int = setting(
        0, "Cores that a Spark driver uses; 0 takes what this process may use.", low=0, high=1024
    )
    spark_memory: str = setting(
        "1g", "Heap of a Spark driver.", pattern=_MEMORY, allowed="a number with m or g, such as 800m or 2g"
    )
    operations_at_once: int = setting(
        0, "Operations that may run Spark at once; the others wait in turn. 0: one for two cores.", low=0, high=1024
    )
    spark_ui: bool = setting(False, "Serve Spark's own web interface.")
    ivy_settings: str = setting("", "Ivy settings file for fetching Spark's jars from a repository of your own.")

    def __post_init__(self) -> None:
        for name, folder in _user_folders(os.environ).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, folder)
        for spec in _SPECS.values():
            check(spec, getattr(self, spec.name), spec.env)
        if bool(self.log_tls_cert) != bool(self.log_tls_key):
            raise InvalidSettings("MILLRACE_LOG_TLS_CERT and MILLRACE_LOG_TLS_KEY belong together: give both, or none")

    @classmethod
    def load(cls, *, env: Mapping[str, str] | None = None, file: Path | str | None = None) -> Self:
        """Settings from `file` (default: the one ``MILLRACE_CONFIG`` names, if any) and `env` (default: this process's).

        Raises InvalidSettings that names the variable or key and what is allowed, or says why the data folder cannot be one.
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
                    raise InvalidSettings(f"{where} is no setting{_closest(key, _SPECS)}")
                values[key] = parse(_SPECS[key], raw, where)
                named = where if key == "data_dir" else named
        by_env = {spec.env: spec for spec in _SPECS.values()}
        for variable in sorted(env):
            if not variable.startswith(PREFIX) or variable in RESERVED or variable.startswith(TEST_PREFIX):
                continue
            if variable not in by_env:
                raise InvalidSettings(f"{variable} is no setting{_closest(variable, by_env)}")
            spec = by_env[variable]
            values[spec.name] = parse(spec, env[variable], variable)
            named = variable if spec.name == "data_dir" else named
        check_data_folder(values["data_dir"], named)
        return cls(**values)

    def environment(self) -> dict[str, str]:
        """These settings as ``MILLRACE_*`` variables: what a process that this one starts is handed."""
        return {spec.env: str(getattr(self, spec.name)) for spec in _SPECS.values()}

    @property
    def log_tls(self) -> tuple[str, str, str] | None:
        """Certificate, key and name of the log's server; None: no TLS."""
        return (self.log_tls_cert, self.log_tls_key, self.log_tls_name) if self.log_tls_cert else None

    @property
    def log_path(self) -> Path:
        """Folder of the embedded log."""
        return self.data_dir / "log"

    @property
    def tables_uri(self) -> str:
        """The place of all tables."""
        return self.tables or str(self.data_dir)

    def table_uri(self, name: str) -> str:
        """Where the table `name` lies."""
        return f"{self.tables_uri}/{name}"

    def with_data_dir(self, data_dir: Path) -> Self:
        """These settings for another data folder, which has the tables, too."""
        return dataclasses.replace(self, data_dir=data_dir, tables="")

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

    def collections_uri(self, collection_id: int) -> str:
        """The Delta table with the rows of one collection."""
        return self.table_uri(f"collections/{collection_id}")

    def deletes_uri(self, collection_id: int) -> str:
        """The Delta table with the deletes of one collection."""
        return self.table_uri(f"deletes/{collection_id}")

    @property
    def staged_path(self) -> Path:
        """Folder of the staged files that Import messages name."""
        return self.data_dir / "staged"

    @property
    def parked_path(self) -> Path:
        """Folder of the parked PChannels (millrace.node.range_loop.parking)."""
        return self.data_dir / "parked"

    def progress_path(self, query: str) -> Path:
        """The file that says how a streaming query is doing, rewritten behind each of its micro-batches."""
        return self.node_run_path / f"{query}.json"

    def spark_checkpoint_path(self, name: str) -> Path:
        """Spark's own checkpoint of the streaming query `name`: a hint that may be deleted, never the truth."""
        return self.data_dir / "spark" / (f"{name}@{self.node}" if self.node else name)

    @property
    def run_path(self) -> Path:
        """Where running processes say where they are (address files, locks)."""
        return self.data_dir / "run"

    @property
    def node_run_path(self) -> Path:
        """What a node says of itself alone (progress, heartbeat): with one node, where all processes do."""
        return self.run_path / "nodes" / self.node if self.node else self.run_path

    @property
    def cores(self) -> int:
        """The cores a Spark driver uses, with 0 resolved to what this process may use."""
        return self.spark_cores or len(os.sched_getaffinity(0))

    @property
    def spark_slots(self) -> int:
        """Operations that may run Spark at once."""
        return self.operations_at_once or max(1, self.cores // 2)


_SPECS: Final[dict[str, SettingSpec]] = {
    item.name: SettingSpec(
        item.name, item.metadata["env"] or PREFIX + item.name.upper(), str(item.type), item.default, item.metadata
    )
    for item in dataclasses.fields(Settings)
}

_DEFAULTS_IN_WORDS: Final = {
    "data_dir": "${XDG_DATA_HOME:-~/.local/share}/millrace",
    "cache_dir": "${XDG_CACHE_HOME:-~/.cache}/millrace",
}


def describe() -> list[tuple[str, str, str, str]]:
    """(name, environment variable, default, words) of every setting, in the order of the class."""
    return [
        (spec.name, spec.env, _DEFAULTS_IN_WORDS.get(spec.name, str(spec.default)), spec.metadata["words"])
        for spec in _SPECS.values()
    ]


def non_default_settings(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults, by name; without data and cache folder, which are a machine's own."""
    return {
        name: value
        for name, spec in _SPECS.items()
        if name not in _DEFAULTS_IN_WORDS and (value := getattr(settings, name)) != spec.default
    }


def _closest(name: str, names: Mapping[str, SettingSpec]) -> str:
    found = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else f"; settings are {', '.join(sorted(names))}"
