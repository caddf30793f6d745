"""Delta's jars, pinned by digest, fetched once into the cache folder, and passed to Spark by path.

Spark's own way (``spark.jars.packages``) resolves over the network at every start and brings 33 jars, most of which
Spark has already. Here the Ivy inside the pyspark package fetches just those of Delta's transitive dependencies that Spark
lacks; each is checked against its SHA-256, and the folder appears under its final name only when it is whole. A later
start looks at file names alone. ``python -m millrace.spark_jars`` fetches them ahead of time.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from millrace.errors import DeadlineExceeded, InvalidSettings
from millrace.java import find_java
from millrace.settings import Settings

DELTA_VERSION: Final = "4.4.0"
SPARK_VERSION: Final = "4.2"


class Jar(NamedTuple):
    """One pinned artifact of Maven Central."""

    organisation: str
    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}.jar"


JARS: Final = (
    Jar(
        "io.delta", "delta-spark_4.2_2.13", "4.4.0", "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead"
    ),
    Jar("io.delta", "delta-storage", "4.4.0", "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc"),
    Jar("io.delta", "delta-kernel-api", "4.4.0", "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11"),
    Jar(
        "io.delta", "delta-kernel-defaults", "4.4.0", "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b"
    ),
    Jar(
        "io.delta",
        "delta-kernel-unitycatalog",
        "4.4.0",
        "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa",
    ),
    Jar(
        "io.unitycatalog",
        "unitycatalog-client",
        "0.6.0",
        "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19",
    ),
    Jar(
        "io.unitycatalog",
        "unitycatalog-hadoop",
        "0.6.0",
        "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150",
    ),
    Jar(
        "com.fasterxml.jackson.datatype",
        "jackson-datatype-jdk8",
        "2.13.5",
        "e58761751fea8a00dc626aae1c5f1be38c5cfd487aeb333d933a4ab5f5a73c55",
    ),
)
"""What delta-spark 4.4.0 for Spark 4.2 needs at run time and Spark 4.2 does not ship."""


def jars_folder(settings: Settings) -> Path:
    """Where the jars of these versions are cached."""
    return settings.cache_dir / "jars" / f"delta-{DELTA_VERSION}-spark-{SPARK_VERSION}"


def delta_jars(settings: Settings, *, deadline: float = 300) -> list[str]:
    """Paths of the jars, for ``spark.jars``; fetches them first where the cache lacks them.

    Several processes may ask at once: one fetches, the others wait, at most `deadline` seconds. Raises InvalidSettings
    (no pyspark or Java here, nothing to be had from the repository, a digest that differs) or DeadlineExceeded.
    """
    folder = jars_folder(settings)
    paths = [folder / jar.file_name for jar in JARS]
    if not all(path.is_file() for path in paths):
        end = time.monotonic() + deadline
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock", end):
            if not all(path.is_file() for path in paths):
                _fetch(folder, settings.ivy_settings, end)
    return [str(path) for path in paths]


@contextmanager
def _locked(path: Path, end: float) -> Iterator[None]:
    """Hold the lock file `path`; the kernel releases it if the holder dies. Raises DeadlineExceeded at `end`."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise DeadlineExceeded(
                        f"another process holds {path} and fetches Spark's jars; try again"
                    ) from None
                time.sleep(0.1)
        yield


def _fetch(folder: Path, ivy_settings: str, end: float) -> None:
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
        (staging / "ivy.xml").write_text(_ivy_module(), encoding="utf-8")
        command = [str(java), "-jar", str(ivy), "-warn", "-cache", str(staging / "cache"), "-confs", "default"]
        command += ["-ivy", str(staging / "ivy.xml"), "-types", "jar", "bundle"]
        command += ["-retrieve", f"{staging}/jars/[artifact]-[revision].[ext]"]
        command += ["-settings", ivy_settings] if ivy_settings else []
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1.0, end - time.monotonic()), check=False
            )
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded("fetching Spark's jars took too long: is Maven Central reachable?") from None
        for jar in JARS:
            _verify(staging / "jars" / jar.file_name, jar, (done.stdout + done.stderr)[-2000:])
        # What stands there is incomplete (somebody deleted a file), or it would not be fetched.
        shutil.rmtree(folder, ignore_errors=True)
        (staging / "jars").replace(folder)


def _ivy_module() -> str:
    dependencies = "\n".join(
        f'    <dependency org="{jar.organisation}" name="{jar.name}" rev="{jar.version}" transitive="false"'
        ' conf="default->master"/>'
        for jar in JARS
    )
    return (
        '<ivy-module version="2.0">\n  <info organisation="millrace" module="jars"/>\n'
        f'  <configurations><conf name="default"/></configurations>\n  <dependencies>\n{dependencies}\n'
        "  </dependencies>\n</ivy-module>\n"
    )


def _verify(path: Path, jar: Jar, output: str) -> None:
    if not path.is_file():
        raise InvalidSettings(f"{jar.file_name} could not be fetched from Maven Central:\n{output}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != jar.sha256:
        raise InvalidSettings(f"{jar.file_name} has another SHA-256 ({digest}) than the pinned one; it is not used")


if __name__ == "__main__":
    sys.stdout.write("\n".join(delta_jars(Settings.load())) + "\n")
