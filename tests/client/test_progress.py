"""The progress of a long call: one line of a terminal or a notebook, erased at its end."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pyarrow as pa
import pytest

from millrace.client import progress
from millrace.client.progress import progress_line, report_rows

BATCH = pa.record_batch({"id": list(range(1000))})


class Terminal(io.StringIO):
    """A terminal that keeps all that was written to it."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """What the line showed, one after another."""
        return [each.rstrip() for each in self.getvalue().split("\r")]


def show_on(monkeypatch: pytest.MonkeyPatch, stream: object) -> None:
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest puts its own sys.stderr back


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    show_on(monkeypatch, made)
    monkeypatch.setattr(progress, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    return made


def test_a_stream_of_known_length_shows_its_share_and_is_erased(terminal: Terminal) -> None:
    assert len(list(report_rows([BATCH] * 4, 4000))) == 4
    assert [each.partition(" %")[0] for each in terminal.lines if "%" in each] == ["25", "50", "75", "100"]
    assert "left, 3,000 rows, " in terminal.getvalue()
    assert terminal.lines[-2:] == ["", ""]


def test_a_stream_of_unknown_length_shows_rows_and_their_rate(terminal: Terminal) -> None:
    list(report_rows([BATCH] * 2))
    assert re.fullmatch(r"1,000 rows, [\d,]+ rows/s", terminal.lines[1])


def test_a_short_call_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_SECONDS", 60.0)
    list(report_rows([BATCH] * 4, 4000))
    assert terminal.getvalue() == ""


def test_a_file_and_a_closed_stream_get_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    show_on(monkeypatch, file)
    list(report_rows([BATCH], 1000))
    assert file.getvalue() == ""
    file.close()
    list(report_rows([BATCH], 1000))
    show_on(monkeypatch, None)
    list(report_rows([BATCH], 1000))


def test_a_notebook_is_no_terminal_and_shows_the_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    show_on(monkeypatch, notebook)
    list(report_rows([BATCH], 1000))
    assert "100 %" in notebook.getvalue()


def test_one_call_at_a_time_has_the_line(terminal: Terminal) -> None:
    with progress_line() as first, progress_line() as second:
        first("one")
        second("two")
    with progress_line() as third:
        third("three")
    assert [each for each in terminal.lines if each] == ["one", "three"]


def test_a_call_that_fails_gives_the_line_back(terminal: Terminal) -> None:
    def fails() -> Iterator[pa.RecordBatch]:
        yield BATCH
        raise ValueError

    with pytest.raises(ValueError):
        list(report_rows(fails()))
    list(report_rows([BATCH], 1000))
    assert "100 %" in terminal.getvalue()


def test_a_line_is_no_wider_than_the_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with progress_line("x" * 100) as show:
        show("y" * 100)
        show("z")
    assert [len(each) for each in terminal.getvalue().split("\r")] == [0, 19, 19, 19, 1, 0]
