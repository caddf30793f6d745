"""What the pages say first: errors at their field, a report's sentence, failures of checks, figures with their age."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.observe.maintenance import quality_sentence, quality_tables
from millrace.observe.models import QualityRow
from millrace.operations.backfill.declaration import BackfillParams
from millrace.operations.operation import OperationReport
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.results import record_run
from millrace.operations.restore.declaration import RestoreParams
from millrace.runtime.launch import history as launch_history
from millrace_airflow.forms import form
from millrace_airflow.ui.text import code, picked
from tests.plugins.ui.conftest import Site


def test_backticks_are_code_and_nothing_else_is_markup(empty_site: Site) -> None:
    assert (
        str(code("run `a <b>` & `c`, not ` or ``")) == "run <code>a &lt;b&gt;</code> &amp; <code>c</code>, not ` or ``"
    )
    page = empty_site.page("collections")
    assert "<code>millrace collections create</code>" in page
    assert "`" not in page.partition("<main")[2]


@pytest.mark.parametrize("path", ["rejections", "transactions"])
def test_an_error_of_a_search_stands_at_its_field_under_a_title_that_names_the_search(site: Site, path: str) -> None:
    answer = site.get(path, html=True, since="yesterday", pchannel="dml_0")
    assert answer.status_code == 422
    page = answer.text
    assert f"The search for {path} did not run." in page
    assert re.search(r'value="yesterday" name="since" aria-invalid="true" aria-describedby="wrong-since"', page)
    assert re.search(r'id="wrong-since">a moment such as [^<]*yesterday', page)
    assert 'value="dml_0"' in page
    assert page.count('aria-invalid="true"') == 1
    assert 'id="wrong-' not in site.page(path)


@pytest.mark.parametrize("path", ["rejections", "transactions"])
def test_a_time_range_is_picked(site: Site, path: str) -> None:
    page = site.page(path, since="2026-11-21T13:00:00+01:00")
    assert re.search(r'type="datetime-local" step="1" value="2026-11-21T12:00:00" name="since"', page)
    assert re.search(r'type="datetime-local" step="1" value="" name="until"', page)
    assert (picked("2026-11-21 13:00"), picked(" "), picked("soon")) == ("2026-11-21T13:00:00", "", None)


def test_rows_are_read_at_a_picked_moment_or_at_a_tick(site: Site) -> None:
    tick = str(site.json("collections/users/sample")["tick"])
    page = site.page("collections/users", view="rows", tick=tick)
    assert f'at tick <span class="id">{tick}</span>' in page
    assert re.search(r'type="datetime-local" step="1" value="" name="at"', page)
    for name, value, words in (("at", "soon", "a moment such as"), ("tick", "x", "a whole number")):
        wrong = site.page("collections/users", view="rows", **{name: value})
        assert "The rows were not read." in wrong
        assert re.search(rf'id="wrong-{name}">{words}', wrong)
        assert f'value="{value}"' in wrong


def test_visible_rows_stand_beside_stored_ones(site: Site) -> None:
    found = site.json("collections/users")
    assert found["visible"] == len(site.json("collections/users/sample", limit=200)["rows"])
    assert site.json("collections")[0]["visible"] is not None
    for page in (site.page("collections"), site.page("collections/users")):
        assert page.index("Visible rows") != page.index("Stored rows")


def test_a_report_opens_with_its_sentence_and_its_details_are_folded(own_site: Site, tmp_path: Path) -> None:
    launch_history.append_history(
        launch_history.history_path(Settings(data_dir=tmp_path / "data"), launch_history.OPERATIONS),
        {
            "run_id": "c-1", "job": "compaction", "attempt": 1, "state": "finished", "started_at": 1.0, "ended_at": 2.0,
            "params": {"dry_run": True}, "error": None, "report": {"summary": "7 files `merged`.", "freed_bytes": 5},
        },
    )  # fmt: skip
    page = own_site.page("maintenance", run="c-1").partition("<main")[2]
    assert "7 files <code>merged</code>." in page
    assert page.index("7 files") < page.index("<summary>report</summary>") < page.index("freed bytes")
    assert not re.search(r"<details[^>]* open", page)
    assert "<dt>summary</dt>" not in page


def test_a_report_says_its_sentence_first() -> None:
    class Report(OperationReport):
        rows: int

        @property
        def sentence(self) -> str:
            return f"{self.rows} rows."

    assert list(Report(rows=3).to_json().items()) == [("summary", "3 rows."), ("rows", 3)]
    assert OperationReport().to_json() == {}


def row(title: str, expectation: str, *, success: bool, critical: bool = False, at: float = 1.0) -> QualityRow:
    return QualityRow(
        at=at, run_id="r", table=title, title=title, expectation=expectation, column="", source="", severity="",
        critical=critical, success=success, observed="", elements=1, unexpected=0, words="", error="",
    )  # fmt: skip


def test_the_newest_result_of_an_expectation_counts_and_failures_come_first() -> None:
    rows = [
        row("b", "x", success=True, at=3.0),
        row("b", "x", success=False, at=2.0),
        row("z", "y", success=False),
        row("z", "w", success=False, critical=True),
        row("a", "x", success=True),
    ]
    tables = quality_tables(rows)
    assert [(each.title, each.expectations, [one.expectation for one in each.failed]) for each in tables] == [
        ("z", 2, ["w", "y"]),
        ("a", 1, []),
        ("b", 1, []),
    ]
    assert quality_sentence(tables) == "2 of 4 expectations on 3 tables failed, 1 of them critical: z."
    assert quality_sentence(quality_tables(rows[:1])) == "All 1 expectations on 1 table hold."


def test_the_quality_page_is_a_summary_with_the_failures_first(own_site: Site, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    checks = [Check(f"c{place}", "expect_column", {"column": "a"}, "why") for place in range(3)]
    results = tuple(CheckResult(each, success=place > 0, unexpected=1) for place, each in enumerate(checks))
    record_run(settings, "run", [TableCheckResult("wal", {}, results)])
    page = own_site.page("quality").partition("<main")[2]
    assert "of them critical: wal." in page
    assert page.index("of them critical") < page.index("<h3>Failed</h3>") < page.index("<h3>By table</h3>")
    assert page.index("<h3>By table</h3>") < page.index('<details id="every-result">')


def test_figures_of_a_job_that_does_not_run_say_how_old_they_are(own_site: Site, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    progress = {"pid": 4194303, "at": time.time() - 3600, "batches": 1, "rows": 1, "pchannels": {}}
    for name in ("streaming-node", "flusher"):
        replace_json(settings.progress_path(name), progress)
    page = own_site.page("").partition("<main")[2]
    assert page.count('<div class="figure stale">') == 3
    assert page.count("last batch <time") == 3
    assert page.count("These figures are old") == 2


def test_a_form_is_opened_under_a_title_that_names_its_action(site: Site) -> None:
    actions, users = (site.get(path, role="admin", html=True).text for path in ("actions", "collections/users"))
    assert 'data-title="Backfill a time range" href="/millrace/actions/backfill_range?' in actions
    assert 'data-title="Restore" href="/millrace/actions/restore?title=Restore&amp;conf=' in users


def test_a_parameter_that_is_a_moment_or_a_tick_says_so_to_its_form() -> None:
    made = form(RestoreParams)
    assert made["at"].schema["format"] == "tick-or-date-time"
    assert form(BackfillParams)["start"].schema["format"] == "date-time"
    assert "examples" in form(BackfillParams)["table"].schema, "the table is in plain sight, known or not"
