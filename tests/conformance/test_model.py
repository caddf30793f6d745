"""A log against a list: any sequence of appends, reads, truncations and restarts agrees with the plain model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from millrace.base.errors import PositionTruncated
from millrace.message.ids import EARLIEST, LogId
from tests.conformance.backends import PARAMETERS
from tests.conformance.conftest import Deployment
from tests.conformance.reading import Entry, read_all

batches = st.lists(st.one_of(st.binary(max_size=30), st.integers(0, 90_000).map(bytes)), max_size=6)


class LogMachine(RuleBasedStateMachine):
    """One log of one backend, and the list of what it must hold."""

    backend: str

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.deployment = Deployment(self.backend, Path(self.directory.name) / "log")
        self.deployment.service.create("p")
        self.log = self.deployment.service.open("p")
        self.entries: list[Entry] = []
        self.begin = EARLIEST
        self.last = LogId(0, -1)

    @rule(values=batches)
    def append(self, values: list[bytes]) -> None:
        ids = self.log.append(values)
        assert ids == sorted(set(ids))
        assert len(ids) == len(values)
        if ids:
            assert ids[0] > self.last
            self.last = ids[-1]
        self.entries += zip(ids, values, strict=True)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), max_bytes=st.integers(0, 200_000))
    def read_a_range(self, data: st.DataObject, max_bytes: int) -> None:
        start = data.draw(st.integers(0, len(self.entries) - 1))
        stop = data.draw(st.integers(0, len(self.entries) - 1))
        position, end = self.entries[start][0], self.entries[stop][0]
        assert read_all(self.log, position, end=end, max_bytes=max_bytes) == self.entries[start:stop]

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        kept = data.draw(st.integers(0, len(self.entries)))
        self.begin = self.entries[kept][0] if kept < len(self.entries) else self.log.describe().end
        self.log.truncate(self.begin)
        self.entries = self.entries[kept:]

    @rule()
    def restart(self) -> None:
        self.log = self.deployment.restart().open("p")

    @invariant()
    def the_log_is_the_model(self) -> None:
        described = self.log.describe()
        assert described.begin == self.begin
        assert described.end == self.last.following() or self.last.entry < 0
        assert read_all(self.log, self.begin) == self.entries
        if self.begin > EARLIEST:
            with pytest.raises(PositionTruncated):
                self.log.read(LogId(self.begin.ledger, self.begin.entry - 1))

    def teardown(self) -> None:
        self.deployment.service.close()
        self.directory.cleanup()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("backend", PARAMETERS)
def test_a_log_behaves_as_a_list_that_survives_restarts(backend: str) -> None:
    machine = type("Machine", (LogMachine,), {"backend": backend})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=settings.default.max_examples // 10,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
