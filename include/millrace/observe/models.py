"""What the read model answers: one frozen pydantic model for each thing that is shown, and for the JSON of the REST API.

Times are Unix seconds (floats), time ticks and 64-bit ids stand as decimal strings because JavaScript's numbers do not hold
them, sizes are bytes, durations seconds.
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
    "maintenance_failed", "maintenance_retry", "clock", "tokens_refused",
]  # fmt: skip


class BaseView(BaseModel):
    """Root of the answers."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _moments(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`x_time` is the moment of `x_tick` in Unix seconds, None for 0."""
        ticks = {name: int(values.get(f"{name[:-5]}_tick") or 0) for name in cls.model_fields if name[-5:] == "_time"}
        return {name: tick_physical_ms(tick) / 1000 for name, tick in ticks.items() if tick} | values


class HealthFinding(BaseView):
    """One thing that is not as it should be."""

    severity: Literal["critical", "warning"]
    kind: HealthKind
    subject: str
    """The PChannel, job, collection or expectation."""
    words: str
    where: str
    """Where to go with it."""
    run: str = ""
    """The id of the run that it is about, whose log says more; empty: it is about no run."""


class JobView(BaseView):
    """A streaming query, by its progress file."""

    name: str
    state: Literal["running", "stopped", "never started"]
    pid: int | None = None
    at: float | None = None
    """When it last finished a micro-batch."""
    batches: int = 0
    rows: int = 0
    """Since its start: rows of the WAL (messages) for the streaming node, rows of collections for the flusher."""
    log_bytes: int = 0
    commit_seconds: float | None = None
    seconds: dict[str, float] = {}
    """Of the last micro-batch by part, the slowest PChannel's."""
    failures: dict[str, str] = {}
    """By PChannel: what its last micro-batch could not do."""
    doing: str = ""
    """What Spark says of it now, by the heartbeat of its driver."""
    busy_seconds: float | None = None
    """How long it is in its present micro-batch."""


class PChannelView(BaseView):
    """One PChannel: who works on it, and how far it is."""

    name: str
    owner: str | None
    """The streaming node that has it; None where none runs."""
    term: int
    time_tick: Int64String
    """The last committed one."""
    time: float | None
    """Its moment."""
    log_end: str | None
    log_bytes: int | None
    wal_position: str | None
    lag_seconds: float | None
    """Age of the oldest log entry that the WAL lacks; 0 where it lacks none; None where the log cannot be asked."""
    messages: int
    rejections: int
    flushed_tick: Int64String
    flushed_time: float | None
    flush_lag_seconds: float
    """How far the collections' tables are behind the WAL."""
    open_transactions: int
    vchannels: int
    growing_rows: int
    growing_bytes: int
    parked: str | None


class OverviewTotals(BaseView):
    """Over all PChannels."""

    messages: int
    rejections: int
    collections: int
    open_transactions: int
    growing_rows: int
    messages_per_second: float
    """Into the WAL: an insert of many rows is one message."""
    rows_per_second: float
    """Into the collections' tables."""
    bytes_per_second: float
    """Read from the log."""
    lag_seconds: float | None
    flush_lag_seconds: float
    freshness_seconds: float | None
    """How old the newest row of the last micro-batch was when it could be read."""


class Overview(BaseView):
    """The state of the whole, now."""

    at: float
    state: HealthState
    words: str
    """Why it is that state, in a sentence."""
    log_server: bool
    jobs: list[JobView]
    pchannels: list[PChannelView]
    totals: OverviewTotals
    findings: list[HealthFinding]
    """Everything that is not as it should be, the worst first."""
    problems: list[str]
    """The findings, a line each."""


class Series(BaseView):
    """One line of a chart: a value (None: nothing known) for each bucket."""

    name: str
    label: str
    unit: Literal["messages/s", "rows/s", "B/s", "s"]
    values: list[float | None]


class HistoryView(BaseView):
    """Charts over the last `seconds`, in buckets of `step` seconds; the first bucket begins at `start`."""

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
    """Rows in its table, deleted ones included."""
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
    """A VChannel of a collection, and how far it is flushed."""

    name: str
    pchannel: str
    flushed_tick: Int64String
    flushed_time: float | None


class PartitionView(BaseView):
    """A partition of a collection, with its flushed segments' rows and payload bytes."""

    id: Int64String
    name: str
    segments: dict[str, int]
    rows: int
    bytes: int


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
    """Reads before it are not possible; 0: all of history can be read."""
    base_time: float | None = None


class SegmentView(BaseView):
    """A segment in its newest state; of one that grows, what is in it so far."""

    pchannel: str
    vchannel: str
    partition: str
    segment_id: Int64String
    state: SegmentState
    rows: int
    bytes: int
    policy: str
    merged_into: Int64String
    """The segment that compaction joined it to; 0: none."""
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
    """A part of a list that is ordered and paged by number."""

    total: int
    offset: int
    limit: int


class SegmentPage(Page):
    """Segments, newest first."""

    items: list[SegmentView]


class FilePage(Page):
    """Files in the order that was asked for."""

    items: list[FileView]


class RowSample(BaseView):
    """Some of a collection's rows at a time tick."""

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


class MessageView(MessageRow):
    """A row of the WAL with what it carries."""

    payload_bytes: int
    payload: Any
    """Rows or keys as objects, a control message's body, or ``{"error": ...}``."""
    payload_cut: bool
    """Whether only the beginning of it is shown."""


class Search(BaseView):
    """A page of a search, newest first."""

    version: int | None
    """Of the WAL table."""
    next: str | None
    """Hand it over as `before` for what comes after; None at the end."""
    complete: bool
    """False where the search stopped at its bound before the page was full: go on with `next`."""


class RejectionSearch(Search):
    """Rejected messages, newest first."""

    items: list[MessageRow]
    reasons: list[str]
    """All reasons there can be."""


class TransactionRow(BaseView):
    """A transaction that is open or ended."""

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
    """Open transactions, and a page of those that ended, newest first."""

    open: list[TransactionRow]
    items: list[TransactionRow]


class CheckpointView(BaseView):
    """A PChannel's checkpoints, and what of its log they would let go."""

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
    """Where the log may begin: the minimum of both checkpoints."""
    truncate_time: float | None
    """When that entry was appended (embedded log)."""
    files: int | None
    """Files of the embedded log."""
    free_bytes: int | None
    """About: files of the embedded log that were last written before that entry."""
    holds: str
    """What keeps the log from being freed further."""


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
    """Files below SMALL_FILE_BYTES: what compaction would join."""
    largest: int
    median: int


class OperationRow(BaseView):
    """An operation that runs, or ran."""

    job: str
    run_id: str
    state: str
    attempt: int
    started: float | None
    ended: float | None
    words: str
    """Its error, or what it is at."""
    done: float | None = None
    before: int | None = None
    """How many operations are before it in turn, if its state is "waiting"."""
    expected_start: float | None = None
    """When it may begin (Unix seconds), by how long the operations before it took lately; None: not known."""
    params: dict[str, Any] = {}
    report: dict[str, Any] = {}


class MaintenanceView(BaseView):
    """The tables' health; operations that run, and that ran."""

    tables: list[TableView]
    operations: list[OperationRow]
    running: list[OperationRow]
    small_file_bytes: int
    log: str = ""
    """The last lines of the run's log, if one run was asked for."""


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


class QualityBlock(BaseView):
    """A critical expectation that failed: truncation and vacuum of its table wait."""

    id: str
    table: str
    expectation: str
    run_id: str
    at: float | None
    words: str


class QualityView(BaseView):
    """Results of the data-quality checks, and what they hold back."""

    present: bool
    rows: list[QualityRow]
    blocks: list[QualityBlock]
    docs: bool
    """Whether there are Data Docs."""


CheckpointsView.model_rebuild()
