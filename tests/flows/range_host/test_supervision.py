"""Failures in a row up to the threshold, pauses that grow, so many recoveries; a success or a restart begins anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings, PipelineInvalid
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.file import flow_of_file
from millrace.flows.range_host.status import State
from millrace.flows.range_host.supervision import Supervision, read_status, read_wanted, resting, tasks_path, want
from millrace.pipelines.declaration import pipeline_of

PIPELINE = pipeline_of(
    {
        "id": "p",
        "source": {"kind": "kafka", "bootstrap": ["b:1"], "topics": ["t"]},
        "sink": {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i"},
        "failure_threshold": 3,
        "recovery": {"interval_minutes": 5, "factor": 2, "longest_minutes": 15, "attempts": 2},
    }
)


class Hands:
    now = 1000.0


def _supervision(folder: Path) -> tuple[Supervision, Hands, Settings]:
    hands, settings = Hands(), Settings(data_dir=folder)
    return Supervision(settings, PIPELINE, clock=lambda: hands.now), hands, settings


def _fail(supervision: Supervision, times: int) -> None:
    for _ in range(times):
        supervision.failed("t-0", code="X", cause="because")


def test_a_task_fails_at_the_threshold_and_rests_ever_longer_and_then_for_good(tmp_path: Path) -> None:
    supervision, hands, settings = _supervision(tmp_path)
    path = tasks_path(settings, "p")
    _fail(supervision, 2)
    assert not resting(path, now=hands.now)
    for recovery, minutes in enumerate((5, 10)):
        _fail(supervision, 3 if recovery else 1)
        known = supervision.tasks["t-0"]
        assert (known.state, known.recoveries, known.cause) == (State.FAILED, recovery, "because")
        assert known.retry_at is not None
        assert 60 * minutes <= known.retry_at - hands.now <= 90 * minutes
        assert resting(path, now=known.retry_at - 1) == {"t-0"}
        hands.now = known.retry_at
        assert not resting(path, now=hands.now)
    _fail(supervision, 3)
    assert supervision.tasks["t-0"].retry_at is None
    assert resting(path, now=1e12) == {"t-0"}
    assert supervision.pause(10) == 15 * 60
    # Another driver knows as much; a restart begins anew.
    again, _, _ = _supervision(tmp_path)
    assert again.tasks == supervision.tasks
    again.restart()
    assert not resting(path, now=0.0)


def test_a_success_begins_anew(tmp_path: Path) -> None:
    supervision, _, _ = _supervision(tmp_path)
    _fail(supervision, 2)
    supervision.succeeded(["t-0", "t-1"])
    _fail(supervision, 2)
    assert not supervision.tasks["t-0"].failed


@pytest.mark.parametrize("text", ["", "{", "[]", '{"t-0": 3}', '{"t-0": {"nonsense": 1}}'])
def test_a_file_that_was_cut_is_no_reason_to_stand_still(tmp_path: Path, text: str) -> None:
    supervision, _, settings = _supervision(tmp_path)
    path = tasks_path(settings, "p")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (path.parent / "wanted.json").write_text(text)
    (path.parent / "status.json").write_text(text)
    assert supervision.tasks == {}
    assert not read_wanted(settings, "p").paused
    assert read_status(settings, "p").state is State.UNASSIGNED


def test_what_is_wanted_is_kept_and_each_restart_is_one(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert want(settings, "p", paused=True).serial == 0
    assert want(settings, "p", restart="failed").serial == 1
    found = want(settings, "p", restart="all")
    assert (found.serial, found.restart, found.paused) == (2, "all", True)
    assert read_wanted(settings, "p") == found


def test_a_file_takes_secrets_from_the_environment_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    text = """\
id: p
source:
  kind: kafka
  bootstrap: [b:1]
  topics: [t]
  security: {protocol: SASL_SSL, mechanism: PLAIN, username: u, password: "${env:SECRET}"}
sink: {kind: opensearch, hosts: ["http://h:1"], index_base: i}
"""
    file.write_text(text)
    made = flow_of_file(file, Configuration(), env={"SECRET": "s3"})
    assert made.secrets() == {"source.security.password": "s3"}
    with pytest.raises(InvalidSettings, match="SECRET"):
        flow_of_file(file, Configuration(), env={})
    file.write_text("- a")
    with pytest.raises(PipelineInvalid):
        flow_of_file(file, Configuration(), env={})


def test_the_example_does_what_it_says() -> None:
    import json

    from millrace.flows.records import Record
    from millrace.flows.transform.transform import Transform

    made = Transform(flow_of_file(Path(__file__).parents[3] / "examples" / "flights_pipeline.yaml", Configuration()))
    flight = {
        "carrier": "UA", "flight": 1545, "origin": "EWR", "dest": "IAH", "distance": 1400, "air_time": 227.0,
        "year": 2013,
        "time_hour": "2013-01-01T05:00:00-05:00",
    }  # fmt: skip

    def done(**changes: object) -> tuple[str, dict[str, object] | None, str]:
        sample = made.show(Record("flights", 0, 7, b"UA-1545", json.dumps({**flight, **changes}).encode(), 0))
        return sample.outcome, sample.document, sample.steps[-1].step

    outcome, document, _ = done()
    assert outcome == "index"
    assert document is not None
    assert (document["time_hour"], round(float(str(document["miles_an_hour"])))) == ("2013-01-01T10:00:00Z", 370)
    assert "year" not in document
    assert done(air_time=None)[0] == "index"
    assert (done(distance=80)[0], done(distance=80)[2]) == ("filtered", "no short hops")
    assert (done(carrier="United")[0], done(carrier="United")[2]) == ("error", "well-formed")
