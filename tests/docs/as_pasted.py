"""Run a page as a reader pastes it: ``python -m tests.docs.as_pasted docs/quickstart.md [--verbose]``.

The blocks of the page run in its order, in one empty folder, with a home folder of its own:

- ``sh`` runs in one bash that lasts for the page. With ``title="Second terminal"`` (or any title that ends in
  "terminal") a bash of its own runs it in the background until the page ends.
- ``python`` runs in one Python that lasts for the page.
- any block with ``title="name.ext"`` is written to that file.
- ``text`` is what the blocks since the last ``text`` printed. ``…`` matches what differs from run to run: any
  characters inside a line, any lines if it is alone on one. Time ticks, moments and durations may differ without it.

Lines that make an environment (``pip install``, ``python -m venv``, ``activate``) are left
out, unless --install is given.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]

PAGES = (
    "docs/quickstart.md",
    "docs/tutorials/csv-to-dashboard.md",
    "docs/tutorials/kafka-to-opensearch.md",
    "docs/tutorials/windows-and-patterns.md",
)
"""Pages of which a test runs every block."""

_BLOCK = re.compile(r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]*)\")?[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
_ENVIRONMENT = re.compile(r"^\s*(?:\S*python\S* -m venv|\. |source |(?:\S*python -m )?pip install|cd \S*millrace\b)")
_VOLATILE = (
    re.compile(r"\b\d{15,}\b"),  # a time tick
    re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|\+\d\d:?\d\d)?"),
    re.compile(r"\b\d+(?:\.\d+)? ?(?:ms|s|min)\b"),
)
_MARK = "__end_of_block__"
_EXPORTS = ".exports"
"""The variables of the page's shell, for other terminals: a reader sets them in each."""


class PageFailed(Exception):
    """A block failed, or printed something else than the page says."""


@dataclass
class Shell:
    """A bash that runs blocks one after the other; standard error is part of what a reader sees."""

    folder: Path
    environment: dict[str, str]
    lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin: IO[str] = self.process.stdin
        threading.Thread(target=self._take, args=(self.process.stdout,), daemon=True).start()

    def _take(self, output: IO[str]) -> None:
        for line in output:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(f"{_MARK} closed")

    def start(self, block: str) -> None:
        """Begin a block and return at once."""
        self.stdin.write(f"{{\n{block}\n}} </dev/null\n")
        self.stdin.flush()

    def run(self, block: str, seconds: float) -> list[str]:
        """Run a block to its end; what it printed. Raises PageFailed for an exit code other than 0."""
        self.stdin.write(
            f"failed=0; trap 'failed=1' ERR\n{{\n{block}\n}} </dev/null\nexport -p >'{self.folder / _EXPORTS}'\n"
            f"printf '\\n{_MARK} %d\\n' $failed\n"
        )
        self.stdin.flush()
        printed: list[str] = []
        end = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise PageFailed(f"no end after {seconds:g} s:\n{block}\n--- printed\n" + _end(printed)) from None
            if line.startswith(_MARK):
                if printed and not printed[-1]:
                    printed.pop()  # printed by the mark itself
                if line != f"{_MARK} 0":
                    raise PageFailed(f"failed:\n{block}\n--- printed\n" + _end(printed))
                return printed
            printed.append(line)

    def said(self) -> list[str]:
        """What a block that was started has printed so far."""
        return [self.lines.get() for _ in range(self.lines.qsize())]

    def close(self) -> None:
        """End the shell and everything that it started."""
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5 if each is not signal.SIGKILL else None)
        self.stdin.close()


def _end(lines: list[str]) -> str:
    return "\n".join(lines[-40:])


def python(shell: Shell, number: int, block: str, seconds: float) -> list[str]:
    """Run a block in the page's Python, which `shell` starts when it is first needed."""
    runner = shell.folder / ".session.py"
    if not runner.exists():
        runner.write_text(_SESSION, encoding="utf-8")
        shell.run("mkfifo .asked .told; python .session.py <>.asked >.told 2>&1 & exec 7<>.asked 8<.told", seconds)
    (shell.folder / f".block{number}").write_text(block, encoding="utf-8")
    ask = f"echo .block{number} >&7\nwhile IFS= read -r line <&8; do\n"
    end = f'case "$line" in "{_MARK} "*) break;; esac\nprintf "%s\\n" "$line"\ndone\ntest "$line" = "{_MARK} 0"'
    return shell.run(ask + end, seconds)


_SESSION = f'''
import sys, traceback
names = {{"__name__": "__main__"}}
for name in iter(sys.stdin.readline, ""):
    failed = 0
    try:
        exec(compile(open(name.strip()).read(), "<page>", "exec"), names)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        failed = 1
    print("{_MARK}", failed, flush=True)
'''


def same(expected: list[str], printed: list[str]) -> bool:
    """Whether the page says what was printed."""
    return re.fullmatch(_pattern(_strip(expected)), "\n".join(map(_plain, _strip(printed))) + "\n") is not None


def _strip(lines: list[str]) -> list[str]:
    return "\n".join(line.rstrip() for line in lines).strip("\n").split("\n")


def _plain(line: str) -> str:
    for volatile in _VOLATILE:
        line = volatile.sub("#", line)
    return line


def _pattern(lines: list[str]) -> str:
    parts = []
    for line in lines:
        if line.strip() == "…":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(".*?".join(re.escape(part) for part in _plain(line).split("…")) + "\n")
    return "".join(parts)


@contextlib.contextmanager
def shells(folder: Path, environment: dict[str, str]) -> Iterator[list[Shell]]:
    """The page's bash, and room for those of other terminals; all end with the block."""
    found = [Shell(folder, environment)]
    try:
        yield found
    finally:
        for each in reversed(found):
            each.close()  # first what would start the log server again
        last = Shell(folder, environment)  # the page's own may hang in a block
        with contextlib.suppress(PageFailed):
            last.run(f". ./{_EXPORTS}; millrace log stop || true", 60)
        last.close()


def run(
    page: str, *, seconds: float = 300.0, install: bool = False, verbose: bool = False, programs: Path | None = None
) -> None:
    """Run all blocks of a page, with the Python and the programs of the folder `programs`.

    Raises PageFailed for the first block that does not do what the page says.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="as-pasted-") as temporary:
        home = Path(temporary, "home")
        folder = Path(temporary, "work")
        home.mkdir()
        folder.mkdir()
        environment = {
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # jars are fetched once
            "PATH": os.pathsep.join([str(programs or Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "120",
            "TERM": "dumb",
        }
        environment.pop("MILLRACE_DATA", None)
        if programs is not None:
            environment.pop("PYTHONPATH", None)
        with shells(folder, environment) as terminals:
            try:
                _blocks(text, folder, terminals, seconds, install=install, verbose=verbose)
            except PageFailed as failed:
                others = [f"--- terminal {number}\n{_end(each.said())}" for number, each in enumerate(terminals[1:], 2)]
                raise PageFailed("\n".join([str(failed), *others])) from None


def _blocks(text: str, folder: Path, terminals: list[Shell], seconds: float, *, install: bool, verbose: bool) -> None:
    printed: list[str] = []
    for number, found in enumerate(_BLOCK.finditer(text)):
        language, title, block = found["language"], found["title"] or "", found["text"]
        begun = time.monotonic()
        if title.endswith("terminal"):
            other = Shell(folder, terminals[0].environment)
            terminals.append(other)
            other.start(f". ./{_EXPORTS}\n{block}")
        elif title:
            (folder / title).write_text(block, encoding="utf-8")
        elif language == "sh":
            lines = [line for line in block.splitlines() if install or not _ENVIRONMENT.match(line)]
            printed += terminals[0].run("\n".join(lines), seconds) if any(lines) else []
        elif language == "python":
            printed += python(terminals[0], number, block, seconds)
        elif language == "text":
            if not same(block.splitlines(), printed):
                raise PageFailed("the page says\n" + block + "--- and this was printed\n" + "\n".join(printed))
            printed = []
        if verbose:
            sys.stdout.write(f"--- {language} {title} {time.monotonic() - begun:.1f} s\n{block}")
            sys.stdout.write("".join(f"> {line}\n" for line in printed))
            sys.stdout.flush()


def main() -> int:
    """Run the pages that are named; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--install", action="store_true", help="run lines that install packages, too")
    parser.add_argument("--verbose", action="store_true", help="show each block and what it prints")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long a block may take")
    options = parser.parse_args()
    failed = 0
    for page in options.pages:
        try:
            run(page, seconds=options.seconds, install=options.install, verbose=options.verbose)
            sys.stdout.write(f"{page}: as it says\n")
        except PageFailed as error:
            sys.stdout.write(f"{page}: {error}\n")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
