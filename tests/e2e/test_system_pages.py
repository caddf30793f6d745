"""A headless Chromium on the real system.

It logs in, clicks through every view, and starts a DAG from its filled-in form.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.e2e.browser import Page, browser
from tests.e2e.pages import FRAME, TABS, VIEWS, link, log_in, pictures, start, tab
from tests.e2e.system import Airflow, System

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.spark, pytest.mark.timeout(1200)]


BLANK_BYTES = 16_000
"""A picture of an empty page has fewer."""


@pytest.fixture(scope="module")
def demo(system: System, airflow: Airflow) -> None:
    """Something to look at.

    A transaction that was rolled back, a rejection, a few thousand flights, a checked table.
    """
    system.millrace("--rows", "5000", "--seconds", "5", "--times", "1", module="millrace.demo.running")
    airflow.run("checkpoint").succeeded()
    airflow.run("quality").succeeded()


@pytest.fixture
def page(tmp_path: Path, airflow: Airflow, demo: None) -> Iterator[Page]:
    """A browser that is logged in. No page may complain, or ask another machine for anything."""
    with browser(tmp_path) as made:
        log_in(made, airflow.address, airflow.password)
        made.forget()  # Airflow's own pages ask before there is a login, and are refused
        yield made
        assert made.errors == []
        assert {url for url in made.fetched if not url.startswith(airflow.address)} == set()


def test_airflow_shows_the_pages_within_itself(page: Page) -> None:
    page.click_until(link("Millrace"), "document.querySelector('iframe')")
    page.wait(f"{FRAME}.body.innerText.includes('PChannels') && {FRAME}.body.innerText.includes('dml_0')")
    page.wait(f"{FRAME}.querySelectorAll('svg[data-series] path').length > 2", what="the charts are drawn")


def test_every_view_is_a_click_away(page: Page, airflow: Airflow) -> None:
    page.open(f"{airflow.address}/millrace/", ready="document.querySelector('nav.tabs')")
    for name in TABS:
        tab(page, name)
    tab(page, "Collections")
    page.click(link("flights"))
    for view, words in VIEWS.items():
        page.click(f"[...document.querySelectorAll('.views a')].find((each) => each.innerText === '{view}')")
        page.wait(f"document.querySelector('.views a[aria-current]')?.innerText === '{view}'")
        page.wait(f"document.querySelector('main').innerText.includes('{words}')")
    tab(page, "Transactions")
    page.wait("document.querySelector('main').innerText.includes('rolled back')")
    tab(page, "Rejections")
    page.click("document.querySelector('main a[href*=\"/messages/\"]')")
    page.wait("document.querySelector('main').innerText.includes('Payload')")
    tab(page, "Quality")
    page.click(link("Data Docs"))
    page.wait("location.pathname.endsWith('/data-docs/index.html') && document.body.innerText.length > 100")


def test_a_dag_is_started_from_its_form_and_runs_with_what_the_form_said(page: Page, airflow: Airflow) -> None:
    page.open(f"{airflow.address}/millrace/", ready="document.querySelector('nav.tabs')")
    tab(page, "Checkpoints")
    path = start(page, link("Checkpoint and truncate…"), dry_run="on", sample_mib="7")
    run_id = unquote(path.rpartition("/")[2])
    ran = airflow.wait("checkpoint", run_id).succeeded()
    conf = airflow.dag_run("checkpoint", run_id)["conf"]
    assert (conf["dry_run"], conf["sample_mib"]) == (True, 7)
    assert airflow.result(ran, "checkpoint")["dry_run"]
    page.open(f"{airflow.address}{path}" if path.startswith("/") else path)
    page.wait("document.body.innerText.toLowerCase().includes('success')", what="Airflow shows the run's end")
    page.open(f"{airflow.address}/millrace/maintenance", ready="document.querySelector('#operations')")
    page.wait("document.querySelector('#operations').innerText.includes('checkpoint')")


def test_a_form_says_what_is_wrong_with_a_value(page: Page, airflow: Airflow) -> None:
    page.open(f"{airflow.address}/millrace/checkpoints", ready="document.querySelector('nav.tabs')")
    before = len(airflow.runs("checkpoint"))
    page.click(link("Dry run…"))
    page.wait("document.querySelector('dialog#start[open] button[type=submit]')")
    page.evaluate("document.querySelector('dialog#start details').open = true")
    page.type("document.getElementById('param-sample_mib')", "0")
    page.click("document.querySelector('dialog#start button[type=submit]')")
    said = page.wait("document.querySelector('#wrong-sample_mib')?.innerText")
    assert "at least" in said
    assert "Dry run was not started" in page.evaluate("document.querySelector('dialog#start .refused').innerText")
    assert page.evaluate("document.querySelector('dialog#start').open")
    manual = [
        each
        for each in airflow.runs("checkpoint")[: len(airflow.runs("checkpoint")) - before]
        if each["run_type"] == "manual"
    ]
    assert manual == []
    page.forget()  # the browser's console calls Airflow's answer (400) an error


def test_the_pictures_of_the_documentation_can_be_taken_anew(page: Page, airflow: Airflow, tmp_path: Path) -> None:
    pictures(page, airflow.address, tmp_path / "images")
    kept = Path(__file__).parents[2] / "docs" / "images"
    taken = {file.name for file in (tmp_path / "images").iterdir()}
    assert taken == {file.name for file in kept.glob("*.png")}
    for file in sorted((tmp_path / "images").iterdir()):
        assert file.stat().st_size > BLANK_BYTES, f"{file.name} shows nothing"
