"""The programs under examples/ run as they stand, twice, on a deployment whose tables this process keeps up."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import millrace.testing
from millrace.base.settings import Settings
from millrace.flows.declare.checks import check
from millrace.flows.declare.discovery import declared_flow
from millrace.rpc.discovery import read_record

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if not path.name.startswith("test_"))

SAID = {
    "async_ingest": ["rows: 200"],
    "bulk_load": ["rows: 200000 up to tick"],
    "changes_into_duckdb": ["[(2, 'Bob')]"],
    "consumer_group": ["insert 5 rows", "left for the next start: 0"],
    "daily_quotes": ["closed at: [Decimal('12.50')]", "left: 1 before: 2"],
    "dataclass_rows": ["Order(number=1, customer='Ada'", "lines=['tea', 'cake'], note=None)"],
    "dataframes": ["BOS", "mean of the warm ones: 3.33"],
    "declared_stream": ["trades: 6"],
    "event_sourcing": ["withdrawn: 30", "1: Deposited 100", "2: Withdrawn 30", "too late: VERSION_CONFLICT"],
    "offline_producer": ["rows taken: 1", "meter 7: True"],
    "patterns": ["N101: 0 -> 20 minutes in 6:00:00"],
    "quickstart": ["now: ['Cyd', 'Dan']", "before the transaction: ['Ada', 'Cyd'"],
    "schema_change": ["'weight': None", "'weight': 2.5", "then: ['id', 'city']"],
    "time_travel": [
        "at a tick: [{'item': 'bolt', 'pieces': 100}]",
        "at a moment: []",
        "too early: COLLECTION_NOT_FOUND",
    ],
    "broadcast": ["VChannels: 2", "orders: [{'id': 7, 'state': 'paid'}]", "carts: []"],
    "work_queue": ["1: resize", "2: send", "done: 2", """dead letters: ['{"id": 3, "body": "?"}']""", "discarded: 1"],
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[millrace.testing.Deployment]:
    with (
        millrace.testing.deployment(tmp_path_factory.mktemp("examples") / "data") as made,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("MILLRACE_DATA", str(made.settings.data_dir))
        yield made


def test_each_program_says_something_that_is_known_here() -> None:
    assert {path.stem for path in PROGRAMS} == SAID.keys()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_twice(program: Path, deployment: millrace.testing.Deployment) -> None:
    for _ in range(2):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(program), run_name="__main__")
        for words in SAID[program.stem]:
            assert words in printed.getvalue()
    assert deployment.failures == []


def test_the_program_of_a_group_says_the_same_of_a_server_elsewhere(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = read_record(deployment.settings.log_path)
    assert record is not None
    monkeypatch.setattr(millrace, "connect", partial(millrace.connect, record.address, token=record.token))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / "consumer_group.py"), run_name="__main__")
    for words in SAID["consumer_group"]:
        assert words in printed.getvalue()


def declared(deployment: millrace.testing.Deployment) -> Settings:
    return replace(deployment.settings, flow_declarations="declared_stream")


def test_the_declared_stream_of_the_examples_can_run(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "declared_stream.py"), run_name="__main__")
    stream = declared_flow(declared(deployment), "prices")
    assert [str(each) for each in check(declared(deployment), stream)] == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_declared_stream_of_the_examples_runs_by_the_commands_of_its_first_lines(
    deployment: millrace.testing.Deployment,
) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / "declared_stream.py"), run_name="__main__")
        deployment.settle()
        command = [sys.executable, "-m", "millrace", "flows", "run", "prices", "--available-now"]
        path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent / "include")])
        env = {**os.environ, **declared(deployment).environment(), "PYTHONPATH": path}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        deployment.settle()
        command = [sys.executable, "-m", "millrace", "flows", "batch", "prices", "--json"]
        asked = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        answers = [json.loads(line) for line in asked.stdout.splitlines()]
        kept = deployment.collection("prices").read()
        assert sorted((each["symbol"], each["low"], each["high"]) for each in answers) == sorted(
            zip(*(kept[name].to_pylist() for name in ("symbol", "low", "high")), strict=True)
        )
        runpy.run_path(str(EXAMPLES / "declared_stream.py"), run_name="__main__")
    for words in (
        "ACME 09:30 between 10.0 and 12.0",
        "ACME 09:31 between 10.0 and 13.0",
        "ACME 09:32 between 11.0 and 11.0",
    ):
        assert words in printed.getvalue()


def test_the_read_model_of_the_examples_can_run(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(EXAMPLES / "event_sourcing.py"), run_name="__main__")
    settings = replace(deployment.settings, flow_declarations="event_sourcing")
    # As a balance must be.
    advice = "source.watermark: without a watermark, the state of GROUP BY and DISTINCT is never removed"
    assert [str(each) for each in check(settings, declared_flow(settings, "balances"))] == [advice]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_the_read_model_of_the_examples_equals_the_states_now_and_at_a_tick(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()):
        names = runpy.run_path(str(EXAMPLES / "event_sourcing.py"), run_name="__main__")
        store = millrace.EventStore.open(deployment, "payments", names["ACCOUNTS"])
        then = store.append("C-9", names["Deposited"](5)).tick
        store.append("C-9", names["Withdrawn"](2))
    deployment.settle()
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent / "include")])
    settings = replace(deployment.settings, flow_declarations="event_sourcing")
    env = {**os.environ, **settings.environment(), "PYTHONPATH": path}

    def flows(*words: str) -> str:
        command = [sys.executable, "-m", "millrace", "flows", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def balances(at: int | None = None) -> dict[str, tuple[int, int]]:
        return {each.key: (each.version, each.state.balance) for each in store.states(at=at)}

    flows("run", "balances", "--until-end")
    deployment.settle()
    table = deployment["balances"].read().to_pylist()
    assert {row["account"]: (row["version"], row["balance"]) for row in table} == balances()
    rebuilt = [json.loads(line) for line in flows("batch", "balances", "--until", str(then), "--json").splitlines()]
    assert {row["account"]: (row["version"], row["balance"]) for row in rebuilt} == balances(then)
    assert balances(then) != balances()


@pytest.mark.slow
def test_the_example_of_a_test_passes_under_pytest() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_your_own.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
