"""Commits the ranges of a supervised query, parks channels, and reports progress in a file, a sample and log lines."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Generic

from millrace.base.errors import CommitFenced
from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.metrics import Metrics
from millrace.node.range_loop.definition import CommitResult, LoopDefinition, R, commit_outcomes
from millrace.node.range_loop.failure import FailedRange
from millrace.node.range_loop.ownership import ChannelOwnership, FullOwnership
from millrace.node.range_loop.parking import Parked, park, parked_names
from millrace.node.range_loop.samples import SampleFile, samples_file, tick_lag

_logger: Final = logging.getLogger(__name__)


class BatchDriver(Generic[R]):
    """The driver's side of one query."""

    def __init__(
        self, definition: LoopDefinition[Any, R], *, metrics: Metrics, ownership: ChannelOwnership | None = None
    ) -> None:
        """Take the committer of `definition`.

        `ownership` says which channels belong to this process. Default: all.
        """
        self._metrics = metrics
        self._owning = ownership or FullOwnership()
        self._folder = definition.parked
        self._committer = definition.committer(metrics, holds=self._owning.holds)
        self._watch = definition.watch(metrics)
        self._reporter = ProcessRegistration(definition.settings.run_path)
        self._progress = definition.settings.progress_path(definition.name)
        self._history = SampleFile(samples_file(definition.settings, definition.name))
        self._failures: dict[str, str] = {}
        """Failures of channels that are neither parked nor have moved since."""
        self._batches = self._rows = self._log_bytes = 0

    def commit(self, outcomes: Sequence[R | FailedRange]) -> CommitResult[R]:
        """Commit the ranges of one micro-batch, park channels whose range cannot be processed, and report.

        Ranges of channels that this process no longer owns are dropped, as if their tasks had been killed; VACUUM
        removes their files.
        """
        with self._owning.committing({each.channel for each in outcomes}) as mine:
            for channel in sorted({each.channel for each in outcomes} - mine):
                _logger.warning("%s no longer belongs to this node: its range is dropped", channel)
            return self._settle([each for each in outcomes if each.channel in mine])

    def _settle(self, outcomes: Sequence[R | FailedRange]) -> CommitResult[R]:
        result, again, ended = commit_outcomes(self._committer, outcomes)
        for report in result.fenced:
            _logger.warning("%s: %s was moved by another committer", CommitFenced.code, report.channel)
        for channel, failed in again.items():
            _logger.warning("%s will be retried at %s: %s", channel, failed.failure.position, failed.failure)
        for channel, failed in ended.items():
            if self._folder is None:
                _logger.error("%s makes no progress and will be retried: %s", channel, failed.failure)
            else:
                parked = Parked.of(channel, failed.failure)
                park(self._folder, parked)
                _logger.error("%s", parked.error())
        names = frozenset() if self._folder is None else parked_names(self._folder)
        if self._folder is not None:
            for each in outcomes:
                self._metrics.wal_parked.labels(each.channel).set(each.channel in names)
        self._watch(result.committed)
        for report in result.committed:
            if report.log_bytes:
                self._owning.record_commit(report.channel, rows=report.rows, bytes=report.log_bytes, tick=report.tick)
        self._note(outcomes, result, {**again, **ended}, names)
        return result

    def _note(
        self,
        outcomes: Sequence[R | FailedRange],
        result: CommitResult[R],
        failed: Mapping[str, FailedRange],
        parked: AbstractSet[str],
    ) -> None:
        now = time.time()
        self._batches += 1
        self._rows += sum(report.rows for report in result.committed)
        self._log_bytes += sum(report.log_bytes for report in result.committed)
        gone = {*result.refused, *(report.channel for report in result.fenced)}
        progress = {
            each.channel: {**each.progress(), "failure": str(each.failure) if each.failure else None}
            for each in outcomes
            if not isinstance(each, FailedRange) and each.channel not in gone
        }
        failures = {name: words for name, words in self._failures.items() if name not in progress}
        failures |= {name: str(each.failure) for name, each in failed.items()}
        self._failures = {name: words for name, words in failures.items() if name not in parked}
        replace_json(
            self._progress,
            {
                "pid": os.getpid(),
                "at": now,
                "batches": self._batches,
                "rows": self._rows,
                "log_bytes": self._log_bytes,
                "version": result.version,
                "commit_seconds": round(result.seconds, 4),
                "parked": sorted(parked),
                "pchannels": {name: {"failure": words} for name, words in self._failures.items()} | progress,
            },
        )
        self._history.add(
            {
                "batches": self._batches,
                "rows": self._rows,
                "bytes": self._log_bytes,
                "commit": round(result.seconds, 3),
                "lag": {report.channel: tick_lag(report.tick, now=now) for report in result.committed},
            }
        )
