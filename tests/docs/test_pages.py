"""The pages are right: links work, named files exist, and tables match the code."""

from __future__ import annotations

import difflib
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pytest
from deltalake import Schema

from millrace.base import errors
from millrace.runtime.child_processes import JobFailed
from millrace.runtime.sandbox.errors import ServiceBusy, TooMuchWork
from millrace.tables.collections.flush_tables import CHECKPOINT_COLUMNS, SEGMENT_COLUMNS
from millrace.tables.wal.table import TABLE_SCHEMA
from millrace.wal import scanner
from millrace.wal.reasons import Reason
from millrace.wal.visible.collection_rows import DELETE_COLUMNS, ROW_COLUMNS
from tests.docs import reference
from tests.docs.code_facts import PACKAGE, ROOT, error_codes, failpoints
from tests.docs.pages import PAGES, anchors, differences, files_named, links, prose, table, text

OPERATING, CONCEPTS, TABLES = "docs/operating.md", "docs/concepts.md", "docs/tables.md"
WIDTH = 120


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_page_and_a_heading(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page if not path else str(PurePosixPath(page).parent / path)
        assert (ROOT / target).exists(), f"{page} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    missing = sorted(name for name in files_named(page) if not (ROOT / name).exists())
    assert not missing, f"{page} names {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_text_is_longer_than_120_columns(page: str) -> None:
    long = [line for line in prose(page) if len(line) > WIDTH and " " in line.strip()[: WIDTH + 1]]
    assert not long, f"{page} has lines of more than {WIDTH} columns"


def test_the_architecture_names_every_folder_of_the_package() -> None:
    named = files_named("docs/architecture.md")
    folders = {f"include/millrace/{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= named


@pytest.mark.parametrize("where, heading", reference.TABLES)
def test_the_tables_that_are_made_from_the_code_are_up_to_date(where: str, heading: str) -> None:
    page = text(where)
    made = reference.with_table(page, heading, reference.TABLES[where, heading]())
    changed = [line for line in difflib.ndiff(page.splitlines(), made.splitlines()) if line[0] in "+-"]
    assert not changed, "run python -m tests.docs.reference:\n" + "\n".join(changed)


def test_every_error_is_there_with_its_code_and_whether_a_retry_helps() -> None:
    roots = {errors.MillraceError.code, errors.LogError.code}  # never raised themselves
    rows = {code: retriable for code, retriable, _ in table(OPERATING, "Errors")}
    assert rows.keys() == error_codes() - roots
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)] + [JobFailed, ServiceBusy, TooMuchWork]
    for kind in classes:
        if issubclass(kind, errors.MillraceError) and kind.code not in roots:
            assert rows[kind.code] == ("yes" if kind.retriable else "no"), kind.code


def test_every_reason_of_a_rejection_is_explained() -> None:
    assert [row[0] for row in table(CONCEPTS, "Rejections")] == [reason.value for reason in Reason]


def test_every_deliver_policy_is_explained_and_every_filter_is_named() -> None:
    rows = [row[0] for row in table(CONCEPTS, "Scans and deliver policies")]
    assert rows == [kind.__name__ for kind in scanner.DeliverPolicy.__args__]
    for kind in scanner.Filter.__args__:
        assert f"`{kind.__name__}`" in text(CONCEPTS)


def delta_types(schema: pa.Schema) -> list[list[str]]:
    """Return [name, Delta type] of each column."""
    return [[field.name, field.type.type] for field in Schema.from_arrow(schema).fields]


DATE = pa.field("_date", pa.date32())
PCHANNEL = pa.field("pchannel", pa.utf8())


@pytest.mark.parametrize(
    ("heading", "schema"),
    [
        ("wal", TABLE_SCHEMA),
        (r"tables/\<id\>/_rows", pa.schema([*ROW_COLUMNS, DATE])),
        (r"deletes/\<id\>", pa.schema([*DELETE_COLUMNS, DATE])),
        ("segments", pa.schema([*SEGMENT_COLUMNS, PCHANNEL])),
        ("checkpoints", pa.schema([*CHECKPOINT_COLUMNS, PCHANNEL])),
    ],
)
def test_a_tables_columns_are_those_of_its_schema(heading: str, schema: pa.Schema) -> None:
    assert not differences([row[:2] for row in table(TABLES, heading)], delta_types(schema))


def test_every_place_where_a_crash_test_can_stop_a_process_is_in_the_architecture() -> None:
    page = text("docs/architecture.md")
    assert failpoints()
    assert not sorted(name for name in failpoints() if f"`{name}`" not in page)


def test_the_make_targets_that_the_pages_name_are_there() -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for line in text(page).replace("`", "\n").split("\n"):
            words = line.split()
            if words[:1] == ["make"] and len(words) > 1 and words[1].islower() and Path(words[1]).name == words[1]:
                assert f"{words[1]}:" in targets or f" {words[1]} " in targets, f"{page}: make {words[1]}"
