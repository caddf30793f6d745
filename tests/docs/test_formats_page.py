"""docs/formats.md lists every version constant once, with its value. A newer version is refused, not misread."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import UnsupportedVersion
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import FORMAT_VERSION, read_collections
from millrace.client.produce.files import journal
from millrace.coord.catalog.database import CoordinatorDb
from millrace.flows.spark_host import incarnations
from millrace.operations.backfill import staging_folder
from millrace.operations.restore import records
from millrace.storage.local import LocalStore
from tests.docs.code_facts import PACKAGE
from tests.docs.pages import table

PAGE = "docs/formats.md"
_VERSIONS = re.compile(r"_?([A-Z_]+_)?(VERSIONS?|FORM|MAGIC)")
_MAY_HAVE = re.compile(rf"^{_VERSIONS.pattern}\s*:", re.MULTILINE)


def versions() -> set[str]:
    """Return `module:NAME` of each constant whose name says that it is a version: a number, bytes, or a tuple."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if _MAY_HAVE.search(text) else ():
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=int() | bytes()) | ast.Tuple()):
                    if _VERSIONS.fullmatch(name):
                        found.add(f"{module}:{name}")
    return found


def test_each_version_in_the_code_is_on_the_page_once() -> None:
    named = [row[2] for row in table(PAGE, "Versioned")] + [row[0] for row in table(PAGE, "Other versions in the code")]
    assert sorted(named) == sorted(versions())


@pytest.mark.parametrize("row", table(PAGE, "Versioned"), ids=lambda row: row[2])
def test_the_page_has_the_versions_value(row: list[str]) -> None:
    module, _, name = row[2].partition(":")
    value = getattr(import_module(module), name)
    shown = (
        value.decode()
        if isinstance(value, bytes)
        else ", ".join(map(str, value))
        if isinstance(value, tuple)
        else str(value)
    )
    assert row[3] == shown


NEWER: dict[str, Callable[[Path], Any]] = {}
"""By format: writes the version after this build's, and reads it."""


def newer(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    NEWER[read.__name__] = read
    return read


def _json(path: Path, **fields: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))


@newer
def restore_under_way(folder: Path) -> Any:
    settings = Settings(data_dir=folder)
    records.write_record(settings, "users", {"state": "loading"})
    [path] = records.restores_path(settings).iterdir()
    _json(path, version=records.VERSION + 1, state="loading")
    return records.read_record(settings, "users")


@newer
def staged_import(folder: Path) -> Any:
    _json(folder / staging_folder.MANIFEST, version=staging_folder.VERSION + 1)
    return staging_folder.StagingManifest.read(LocalStore(folder))


@newer
def journal_of_a_load(folder: Path) -> Any:
    with journal.open_journal(folder / "journal", {"rows": 1}) as made:
        made.save()
    written = json.loads((folder / "journal").read_text())
    _json(folder / "journal", **written | {"version": journal.VERSION + 1})
    with journal.open_journal(folder / "journal", {"rows": 1}) as again:
        return again.position


@newer
def declared_flow(folder: Path) -> Any:
    stream = incarnations.Incarnations(Settings(data_dir=folder), "hourly")
    stream.keep(incarnations.State())
    assert stream.state == incarnations.State()
    _json(stream.folder / "state.json", version=incarnations.VERSION + 1)
    return stream.state


def _catalog(folder: Path) -> Path:
    path = folder / "coord" / "coord.db"
    CoordinatorDb(path).close()
    with sqlite3.connect(path) as db:
        assert db.execute("pragma user_version").fetchone() == (FORMAT_VERSION,)
        db.execute(f"pragma user_version = {FORMAT_VERSION + 1}")
    db.close()
    return path


@newer
def catalog_that_is_written(folder: Path) -> Any:
    return CoordinatorDb(_catalog(folder))


@newer
def catalog_that_is_looked_at(folder: Path) -> Any:
    _catalog(folder)
    return read_collections(folder)


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_version_is_refused_and_not_misread(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedVersion, match="build"):
        NEWER[name](tmp_path)


def test_a_catalog_of_an_earlier_build_is_read_and_gets_a_version(tmp_path: Path) -> None:
    path = tmp_path / "coord" / "coord.db"
    CoordinatorDb(path).close()
    with sqlite3.connect(path) as db:
        db.execute("pragma user_version = 0")
    db.close()
    assert read_collections(tmp_path) == []
    CoordinatorDb(path).close()
    with sqlite3.connect(path) as db:
        assert db.execute("pragma user_version").fetchone() == (FORMAT_VERSION,)
    db.close()
