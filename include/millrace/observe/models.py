"""The answers of the read model: frozen pydantic models, shown by the UI and returned as JSON by the REST API.

Times are Unix seconds (floats), sizes are bytes, durations are seconds. Time ticks and 64-bit ids are decimal strings,
because JavaScript numbers cannot hold them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from millrace.catalog.collection import CollectionState
from millrace.message.ids import tick_physical_ms
from millrace.message.types import OnDuplicate
from millrace.wal.schema import RowKind
from millrace.wal.visible.catalog import SegmentState

Int64String = Annotated[str, BeforeValidator(str)]
"""A 64-bit number as a decimal string."""
HealthState = Literal["healthy", "lagging", "degraded", "parked", "stopped", "empty"]
HealthKind = Literal[
    "parked", "job_failed", "job_stopped", "log_stopped", "lagging", "flusher_stalled", "ddl_stuck", "quality_blocks",
    "maintenance_failed", "maintenance_retry", "clock", "tokens_refused", "publish_failed",
]  # fmt: skip


class BaseView(BaseModel):
    """Base class of all models."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _moments(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Set each `x_time` to the time of `x_tick` in Unix seconds, or None for 0."""
        ticks = {name: int(values.get(f"{name[:-5]}_tick") or 0) for name in cls.model_fields if name[-5:] == "_time"}
        return {name: tick_physical_ms(tick) / 1000 for name, tick in ticks.items() if tick} | values


class HealthFinding(BaseView):
    """One problem."""

    severity: Literal["critical", "warning"]
    kind: HealthKind
    subject: str
    """The PChannel, job, collection or expectation."""
    words: str
    where: str
    """The remedy."""
    run: str = ""
    """Id of the run concerned, whose log has details. Empty if it concerns no run."""


class JobView(BaseView):
    """A streaming query according to its progress file."""

    name: str
    state: Literal["running", "stopped", "never started"]
    pid: int | None = None
    at: float | None = None
    """Time at which it last finished a micro-batch."""
    batches: int = 0
    rows: int = 0
    """Rows since its start: WAL messages for the streaming node, collection rows for the flusher."""
    log_bytes: int = 0
    commit_seconds: float | None = None
    seconds: dict[str, float] = {}
    """Seconds of the last micro-batch by phase, for the slowest PChannel."""
    failures: dict[str, str] = {}
    """Failure of each PChannel's last micro-batch."""
    doing: str = ""
    """Spark's current report about it, from the driver's heartbeat."""
    busy_seconds: float | None = None
    """Seconds spent in the current micro-batch."""


class PChannelView(BaseView):
    """One PChannel: its owner and its progress."""

    name: str
    owner: str | None
    """The streaming node that owns it, or None if none runs."""
    term: int
    time_tick: Int64String
    """Last committed tick."""
    time: float | None
    """Time of that tick."""
    log_end: str | None
    log_bytes: int | None
    wal_position: str | None
    lag_seconds: float | None
    """Age of the oldest log entry that the WAL lacks. 0 if it lacks none, None if the log is unavailable."""
    messages: int
    rejections: int
    flushed_tick: Int64String
    flushed_time: float | None
    flush_lag_seconds: float
    """Lag of the collections' tables behind the WAL."""
    open_transactions: int
    vchannels: int
    growing_rows: int
    growing_bytes: int
    parked: str | None


class OverviewTotals(BaseView):
    """Totals over all PChannels."""

    messages: int
    rejections: int
    collections: int
    open_transactions: int
    growing_rows: int
    messages_per_second: float
    """Rate into the WAL. An insert of many rows is one message."""
    rows_per_second: float
    """Rate into the collections' tables."""
    bytes_per_second: float
    """Rate read from the log."""
    lag_seconds: float | None
    flush_lag_seconds: float
    freshness_seconds: float | None
    """Age of the newest row of the last micro-batch when it became readable."""
    freshness_at: float | None = None
    """Time of the measurement."""


class Overview(BaseView):
    """The current state of the deployment."""

    at: float
    state: HealthState
    words: str
    """Reason for the state, in one sentence."""
    log_server: bool
    log_server_pid: int | None
    """Process id of the log's server, or None if it does not run."""
    jobs: list[JobView]
    pchannels: list[PChannelView]
    totals: OverviewTotals
    findings: list[HealthFinding]
    """All problems, the worst first."""
    problems: list[str]
    """The findings, one line each."""


class Series(BaseView):
    """One line of a chart: a value, or None if unknown, for each bucket."""

    name: str
    label: str
    unit: Literal["messages/s", "rows/s", "B/s", "s"]
    values: list[float | None]


class HistoryView(BaseView):
    """Charts over the last `seconds`, in buckets of `step` seconds from `start` on."""

    start: float
    step: float
    seconds: int
    series: list[Series]


class CollectionRow(BaseView):
    """A collection in the list."""

    id: Int64String
    name: str
    state: CollectionState
    fields: int
    partitions: int
    vchannels: int
    rows: int
    """Rows in its table, including deleted ones."""
    visible: int | None = None
    """Rows that a read returns now. None: not counted, because that takes a read of too many rows."""
    deletes: int
    bytes: int
    files: int
    segments: dict[str, int]
    """Segments by state."""
    growing_rows: int
    flushed_tick: Int64String
    flushed_time: float | None = None


class FieldView(BaseView):
    """A field of a collection."""

    name: str
    type: str
    nullable: bool
    key: bool
    event_time: bool
    since_version: int


class VChannelView(BaseView):
    """A VChannel of a collection, with its flush progress."""

    name: str
    pchannel: str
    flushed_tick: Int64String
    flushed_time: float | None


class PartitionView(BaseView):
    """A partition of a collection, with rows and payload bytes of its flushed segments."""

    id: Int64String
    name: str
    segments: dict[str, int]
    rows: int
    bytes: int


class PublishedView(BaseView):
    """The publish status of a collection."""

    uri: str
    version: int | None
    """Version of the published table. None: nothing is published yet."""
    tick: Int64String
    time: float | None
    rows: int
    lag_seconds: float
    """Age of the tick, if the collection has news since; else 0."""
    vector_bytes_per_row: float
    """Bytes of deletion vectors that the newest version wrote for each row of an older file that it hides."""
    pause_seconds: float
    """Pause before the next publish, because the vectors outweighed what was flushed; else 0.0."""
    error: str
    """Reason that the last attempt failed. Empty if it did not."""


class CollectionView(CollectionRow):
    """A collection in full."""

    primary_key: str | tuple[str, ...]
    event_time: str | None
    on_duplicate: OnDuplicate
    schema_version: int
    field_list: list[FieldView]
    partition_list: list[PartitionView]
    vchannel_list: list[VChannelView]
    table_path: str
    table_version: int | None
    base_tick: Int64String
    """The earliest readable tick. 0: the whole history is readable."""
    base_time: float | None = None
    published: PublishedView | None = None
    aliases: list[str] = []


class SegmentView(BaseView):
    """A segment in its newest state. For a growing segment, its current contents."""

    pchannel: str
    vchannel: str
    partition: str
    segment_id: Int64String
    state: SegmentState
    rows: int
    bytes: int
    policy: str
    merged_into: Int64String
    """The segment that compaction joined it to. 0: none."""
    created: float
    since: float


class FileView(BaseView):
    """A file of a collection's table."""

    path: str
    rows: int
    bytes: int
    partition: str
    min_tick: Int64String
    max_tick: Int64String
    modified: float
    min_time: float | None = None
    max_time: float | None = None


class Page(BaseView):
    """A page of an ordered list, addressed by offset."""

    total: int
    offset: int
    limit: int


class CollectionListPage(Page):
    """Collections by name."""

    items: list[CollectionRow]


class SegmentPage(Page):
    """Segments, newest first."""

    items: list[SegmentView]


class FilePage(Page):
    """Files in the requested order."""

    items: list[FileView]


class RowSample(BaseView):
    """A sample of a collection's rows at a time tick."""

    collection: str
    tick: Int64String
    time: float
    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    note: str = ""


class MessageRow(BaseView):
    """A row of the WAL without its payload."""

    id: str
    pchannel: str
    kind: RowKind
    type: str
    vchannel: str
    time_tick: Int64String
    time: float
    """The log's append stamp."""
    term: int
    collection_id: Int64String
    collection: str | None
    partition_id: Int64String
    segment_id: Int64String
    schema_version: int
    rows: int
    txn_id: Int64String
    producer_id: Int64String
    epoch: int
    sequence: Int64String
    last_confirmed: str
    reason: str | None = None
    detail: str | None = None
    principal: str | None = None
    """Name of the token that appended it, or ``machine``; ``asserted:NAME`` if the name was not checked."""


class MessageView(MessageRow):
    """A row of the WAL with its payload."""

    payload_bytes: int
    payload: Any
    """Rows or keys as objects, a control message's body, or ``{"error": ...}``."""
    payload_cut: bool
    """Whether only the beginning is shown."""


class Search(BaseView):
    """A page of a search, newest first."""

    version: int | None
    """Version of the WAL table."""
    next: str | None
    """Pass it as `before` to get the next page. None at the end."""
    complete: bool
    """False if the search reached its row limit before the page was full. Continue with `next`."""


class MessageSearch(Search):
    """Accepted messages, newest first."""

    items: list[MessageRow]


class RejectionSearch(Search):
    """Rejected messages, newest first."""

    items: list[MessageRow]
    reasons: list[str]
    """All possible reasons."""


class TransactionRow(BaseView):
    """An open or ended transaction."""

    txn_id: Int64String
    pchannel: str
    vchannel: str
    collection: str | None
    state: Literal["open", "committed", "rolled back"]
    begin: float | None
    ended: float | None
    end_id: str | None
    end_tick: Int64String = "0"
    bytes: int | None = None
    detail: str | None = None
    expires: float | None = None


class TransactionSearch(Search):
    """Open transactions, and a page of ended ones, newest first."""

    open: list[TransactionRow]
    items: list[TransactionRow]


class CheckpointView(BaseView):
    """A PChannel's checkpoints, and the part of its log that they allow to truncate."""

    pchannel: str
    term: int
    wal_position: str | None
    wal_tick: Int64String
    wal_time: float | None
    flush_tick: Int64String
    flush_time: float | None
    confirmed: str
    written: float | None
    log_begin: str | None
    log_end: str | None
    log_bytes: int | None
    truncate_to: str | None
    """Position up to which the log may be truncated: the minimum of both checkpoints."""
    truncate_time: float | None
    """Time at which that entry was appended (embedded log only)."""
    files: int | None
    """Files of the embedded log."""
    free_bytes: int | None
    """Estimate: bytes of embedded log files last written before that entry."""
    holds: str
    """Reason that the log cannot be truncated further."""


class CheckpointsView(BaseView):
    """Checkpoints of all PChannels, and the newest versions of their table."""

    checkpoints: list[CheckpointView]
    log_server: bool
    log_bytes: int | None
    free_bytes: int | None
    history: list[CommitView]


class CommitView(BaseView):
    """A commit of a Delta table."""

    version: int
    at: float
    operation: str
    added: int | None
    removed: int | None


class TableView(BaseView):
    """A Delta table's health."""

    name: str
    title: str
    version: int
    files: int
    bytes: int
    rows: int
    small_files: int
    """Files below SMALL_FILE_BYTES, candidates for compaction."""
    largest: int
    median: int


class OperationRow(BaseView):
    """A running or finished operation."""

    job: str
    run_id: str
    state: str
    attempt: int
    started: float | None
    ended: float | None
    words: str
    """Its error, or its current step."""
    done: float | None = None
    before: int | None = None
    """Number of operations ahead of it in the queue, if its state is "waiting"."""
    expected_start: float | None = None
    """Expected start in Unix seconds, from recent durations of the operations ahead of it. None if unknown."""
    params: dict[str, Any] = {}
    report: dict[str, Any] = {}


class MaintenanceView(BaseView):
    """The tables' health, and running and finished operations."""

    tables: list[TableView]
    """The deployment's own tables, and those of collections with the most small files."""
    table_count: int
    """The number of tables that were seen."""
    operations: list[OperationRow]
    running: list[OperationRow]
    small_file_bytes: int
    log: str = ""
    """The last lines of a run's log, if one run was requested."""


class QualityRow(BaseView):
    """The result of one expectation in one run."""

    at: float | None
    run_id: str
    table: str
    expectation: str
    column: str
    source: str
    severity: str
    critical: bool
    success: bool
    observed: str
    elements: int
    unexpected: int
    words: str
    error: str
    title: str = ""
    """The table for people: a collection by its name."""


class QualityTable(BaseView):
    """The newest results of one table's expectations."""

    title: str
    at: float | None
    """Time of the table's last check."""
    expectations: int
    failed: list[QualityRow]
    """Failures, critical ones first."""


class QualityBlock(BaseView):
    """A failed critical expectation, which blocks truncation and vacuum of its table."""

    id: str
    table: str
    expectation: str
    run_id: str
    at: float | None
    words: str
    title: str = ""


class QualityView(BaseView):
    """Results of the data-quality checks, and what they block."""

    present: bool
    words: str = ""
    """The newest result of each expectation, in one sentence."""
    tables: list[QualityTable] = []
    """Results by table, those with failures first."""
    rows: list[QualityRow]
    blocks: list[QualityBlock]
    docs: bool
    """Whether there are Data Docs."""


CheckpointsView.model_rebuild()
