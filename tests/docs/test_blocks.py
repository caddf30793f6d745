"""What the pages have a reader type or copy is understood.

Commands, variables, files; and each Python block is run by a test.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.base.errors import BroadcastRefused
from millrace.base.settings import PREFIX, RESERVED, TEST_PREFIX, describe
from millrace.coord.broadcast.kinds import KindCalls, SubmittedBroadcast
from millrace.coord.broadcast.task import BroadcastTask
from millrace.flows.declare.flow import Flow
from millrace.operations.backfill.derived import DerivedTable
from millrace.operations.quality.user_suites import parse_suite
from millrace.rpc.discovery import read_record
from millrace.testing import deployment
from tests.certificates import certificate
from tests.cli import reference
from tests.docs import as_pasted
from tests.docs.code_facts import ROOT
from tests.docs.pages import PAGES, blocks, python_blocks
from tests.docs.test_examples import run

SHELLS = ("sh", "console", "bash")
_MILLRACE = re.compile(r"(?:^|[\s|&;(])(millrace [^#|&;)]*)")


def shell_lines(page: str) -> list[str]:
    """What a page has a reader type.

    Fenced shell, and indented lines that begin with a program of ours; continued lines joined.
    """
    fenced = [block.text for block in blocks(page) if block.language in SHELLS]
    text = (ROOT / page).read_text(encoding="utf-8")
    indented = re.findall(
        r"^    (?:\$ )?((?:[A-Z_]+=\S+ )*(?:millrace|make|python -m millrace)\b.*)$", text, re.MULTILINE
    )
    joined = "\n".join([*fenced, *indented]).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_understood(page: str) -> None:
    for line in shell_lines(page):
        for command in _MILLRACE.findall(" " + re.sub(r"\s#\s.*", "", line)):
            if page != "docs/cli.md":  # whose own test knows its placeholders
                reference.parse(command)


def test_the_pages_have_commands() -> None:
    assert sum("millrace " in line for page in PAGES for line in shell_lines(page)) > 40


@pytest.mark.parametrize("page", PAGES)
def test_variables_of_a_page_are_settings(page: str) -> None:
    known = {env for _, env, *_ in describe()} | RESERVED
    named = set(re.findall(rf"\b({PREFIX}[A-Z_]+)=", (ROOT / page).read_text(encoding="utf-8")))
    assert {name for name in named if not name.startswith(TEST_PREFIX)} <= known


@pytest.mark.parametrize("page", PAGES)
def test_shell_json_and_yaml_of_a_page_are_well_formed(page: str) -> None:
    for block in blocks(page):
        if block.language in ("sh", "bash"):
            subprocess.run([shutil.which("bash") or "bash", "-n"], input=block.text, text=True, check=True, timeout=20)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            found = yaml.safe_load(block.text)
            assert found
            for each in found.get("flows", [found]) if isinstance(found, dict) else []:
                if {"source", "sink"} <= set(each):
                    Flow.of(_without_environment(each), where=page)


def _without_environment(value: Any) -> Any:
    text = re.sub(r"\$(\{env:\w+\}|[A-Z]+)", "127.0.0.1:9092", json.dumps(value, default=str))
    return json.loads(text)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_defines_each_name_that_its_python_uses(page: str) -> None:
    """A reader pastes the blocks, one after the other, into a Python that knows nothing."""
    known = set(vars(builtins))
    for block in python_blocks(page):
        names = [each for each in ast.walk(ast.parse(block.text)) if isinstance(each, ast.Name)]
        known |= {each.id for each in names if not isinstance(each.ctx, ast.Load)} | defined(block.text)
        assert {each.id for each in names if isinstance(each.ctx, ast.Load)} <= known


def defined(code: str) -> set[str]:
    """What imports, functions, classes, parameters and ``except … as`` name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import() | ast.ImportFrom():
                found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.arg():
                found.add(node.arg)
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_python_blocks_of_a_page_are_run_by_a_test(page: str) -> None:
    if page not in as_pasted.PAGES and any(block.language == "python" for block in blocks(page)):
        asked = f'python_blocks("{page}")'
        assert any(asked in path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


def test_the_suite_of_the_quality_page_is_read() -> None:
    (block,) = [each for each in blocks("docs/quality.md") if each.language == "json"]
    checks = parse_suite(block.text, where="the page", columns=["dep_delay", "carrier"])
    assert [check.severity for check in checks] == ["warning", "critical"]


def test_the_python_of_the_quality_page_says_what_blocks_and_what_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    with deployment() as db:
        monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
        names: dict[str, Any] = {}
        for each in python_blocks("docs/quality.md"):
            run(each.text, names)
    assert not names["blocks"]
    assert not names["slices"]


def test_the_queue_of_the_queues_page_hands_out_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    with deployment() as db:
        monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
        [block] = python_blocks("docs/queues.md")
        assert sorted(run(block.text, {}).split()) == ["resize", "send"]


def test_the_blocks_of_the_broadcasts_page_send_and_declare_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, kind = python_blocks("docs/broadcasts.md")
    with deployment() as db:
        monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
        run(sent.text, {})
        assert db["orders"].read().to_pylist() == [{"id": 7, "state": "paid"}]
    names: dict[str, Any] = {}
    run(kind.text, names)
    for number in (5, 4):
        broadcast = SubmittedBroadcast(number, "price_list", "ada", {"list": "autumn"}, (), {})
        KindCalls().check(names["PRICE_LIST"], BroadcastTask(number, "", "price_list", 1, _change("autumn"), (), {}))
        names["PRICE_LIST"].on_acknowledged(broadcast)
    assert names["published"] == {"autumn": 5}
    with pytest.raises(BroadcastRefused, match="name the price list"):
        KindCalls().check(names["PRICE_LIST"], BroadcastTask(6, "", "price_list", 1, _change(""), (), {}))


def _change(name: str) -> dict[str, Any]:
    return {"messages": [], "data": {"list": name}}


def test_the_derived_table_of_the_backfill_page_is_one() -> None:
    names: dict[str, Any] = {}
    for each in python_blocks("docs/backfill.md"):
        run(each.text, names)
    (made,) = names["TABLES"]
    assert isinstance(made, DerivedTable)


@pytest.mark.slow
def test_the_client_of_the_operating_page_reaches_a_server_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path, "log.example.net")
    monkeypatch.setenv("MILLRACE_SERVER_TOKEN", "a-token-that-both-sides-have")
    secured = {"log_tls_cert": str(cert), "log_tls_key": str(key), "log_tls_name": "log.example.net"}
    with deployment(tmp_path / "data", **secured) as db:
        db.create_collection("users", {"id": "int64"}, key="id")
        record = read_record(db.settings.log_path)
        assert record is not None
        names: dict[str, Any] = {}
        for each in python_blocks("docs/operating.md"):
            # Where the page names the host and the certificate of its reader, those of this test.
            there = each.text.replace("grpc+tls://log.example.net:7700", record.address)
            run(there.replace("ca.pem", str(cert)), names)
        assert sorted(names["rows"]["id"].to_pylist()) == [1, 2]


def test_the_blocks_of_the_testing_page_are_a_users_tests(tmp_path: Path) -> None:
    first, fixture = [each.text for each in python_blocks("docs/testing.md")]
    body = "\n".join(f"    {line}" for line in first.splitlines() if not line.startswith("import "))
    test = "def test_it(db):\n    assert not db.collections()\n"
    file = tmp_path / "test_trips.py"
    file.write_text(f"{fixture}\n\n{test}\n\ndef test_page():\n{body}\n", encoding="utf-8")
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
