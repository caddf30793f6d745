"""Fetch jars from Maven Central once into the cache folder, with the Ivy of the pyspark package.

Ivy fetches exactly the listed jars, nothing transitive. Each jar is checked against its SHA-256, and the folder gets
its final name when it is complete, so a later start checks file names only. millrace.runtime.spark.jars lists Delta's
jars, millrace.brokers those of the servers that tests and demos start.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, InvalidSettings, MillraceError
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import sha256_file
from millrace.base.settings import Settings
from millrace.runtime.java import find_java

_PORTION: Final = 32
_AT_ONCE: Final = 6
"""Concurrent Ivy processes, each with a portion of the jars: one process mostly waits for the network."""


class Jar(NamedTuple):
    """One pinned artifact of Maven Central."""

    organisation: str
    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}.jar"


def fetch_jars(
    jars: Sequence[Jar], folder: Path, *, what: str, ivy_settings: str = "", deadline: float = 300
) -> list[str]:
    """Return the paths of `jars` in `folder`, in order, and fetch them first if one is missing.

    `what` names the jars in errors. Concurrent processes fetch once; the others wait, at most `deadline` seconds.
    Raises InvalidSettings without pyspark or Java, on a failed download or another digest, and DeadlineExceeded.
    """
    paths = [folder / jar.file_name for jar in jars]
    if not all(path.is_file() for path in paths):
        end = Deadline.after(deadline)
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.parent / f"{folder.name}.lock"
        busy = DeadlineExceeded(f"another process holds {lock} and fetches {what}; try again")
        with exclusive_lock(lock, deadline=end, busy=busy):
            if not all(path.is_file() for path in paths):
                _fetch(jars, folder, what, ivy_settings, end)
    return [str(path) for path in paths]


def parse_lock(text: str, name: str) -> tuple[Jar, ...]:
    """Return the jars of the lock file `name`: `text` has one `organisation name version sha256` per line."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            parts = line.split()
            if len(parts) != 4:
                raise InvalidSettings(f"{name}.lock: {line!r} is not `organisation name version sha256`")
            found.append(Jar(*parts))
    return tuple(found)


def locked_jars(text: str, name: str, settings: Settings, *, deadline: float = 300) -> list[str]:
    """Return the paths of the jars of the lock file `name`; fetch those that the cache lacks.

    Raises as :func:`fetch_jars`.
    """
    jars = parse_lock(text, name)
    # The folder depends on the lock's content, so that an older checkout keeps its own jars.
    digest = hashlib.sha256("".join(jar.sha256 for jar in jars).encode()).hexdigest()[:12]
    folder = settings.cache_dir / "jars" / f"{name}-{digest}"
    return fetch_jars(jars, folder, what=f"the jars of {name}", ivy_settings=settings.ivy_settings, deadline=deadline)


def _fetch(jars: Sequence[Jar], folder: Path, what: str, ivy_settings: str, end: Deadline) -> None:
    """Fetch the jars with Ivy into a staging folder beside `folder`, check them, move the folder into place."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise InvalidSettings("pyspark is not installed here: run `make venv`")
    ivy = next((Path(spec.origin).parent / "jars").glob("ivy-*.jar"), None)
    if ivy is None:
        raise InvalidSettings("this pyspark brings no Ivy: install the pyspark that requirements.txt names")
    java = find_java() / "bin" / "java"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as name:
        staging = Path(name)

        def run(first: int) -> str:
            """Fetch one portion and return the end of Ivy's output."""
            module = staging / f"{first}.xml"
            module.write_text(_ivy_module(jars[first : first + _PORTION]), encoding="utf-8")
            command = [str(java), "-jar", str(ivy), "-warn", "-cache", str(staging / f"cache-{first}")]
            command += ["-confs", "default", "-ivy", str(module), "-types", "jar", "bundle"]
            command += ["-retrieve", f"{staging}/jars/[artifact]-[revision].[ext]"]
            command += ["-settings", ivy_settings] if ivy_settings else []
            left = end.remaining(minimum=1.0)
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
            return (done.stdout + done.stderr)[-2000:]

        try:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                said = list(threads.map(run, range(0, len(jars), _PORTION)))
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"fetching {what} took too long: is Maven Central reachable?") from None
        for place, jar in enumerate(jars):
            _verify(staging / "jars" / jar.file_name, jar, said[place // _PORTION])
        # An existing folder is incomplete (a file was deleted), or nothing would be fetched.
        shutil.rmtree(folder, ignore_errors=True)
        (staging / "jars").replace(folder)


def _ivy_module(jars: Sequence[Jar]) -> str:
    dependencies = "\n".join(
        f'    <dependency org="{jar.organisation}" name="{jar.name}" rev="{jar.version}" transitive="false"'
        # Name the artifact: some modules have the packaging "bundle" or "nar" and a jar in addition.
        f' conf="default->master"><artifact name="{jar.name}" type="jar" ext="jar"/></dependency>'
        for jar in jars
    )
    return (
        '<ivy-module version="2.0">\n  <info organisation="millrace" module="jars"/>\n'
        f'  <configurations><conf name="default"/></configurations>\n  <dependencies>\n{dependencies}\n'
        "  </dependencies>\n</ivy-module>\n"
    )


def _verify(path: Path, jar: Jar, output: str) -> None:
    if not path.is_file():
        raise InvalidSettings(f"{jar.file_name} could not be fetched from Maven Central:\n{output}")
    digest = sha256_file(path)
    if digest != jar.sha256:
        raise InvalidSettings(f"{jar.file_name} has another SHA-256 ({digest}) than the pinned one; it is not used")


def exit_code(program: Callable[[], object]) -> int:
    """Run a program that fetches jars; return 0, or 1 after one line of error on stderr."""
    try:
        program()
    except MillraceError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    return 0
