"""Delta's jars, pinned by digest, fetched once into the cache folder and passed to Spark by path.

``spark.jars.packages`` would resolve over the network at every start and bring 33 jars, most of which Spark has.
Only those of Delta's transitive dependencies are fetched that Spark lacks.
``python -m millrace.runtime.spark.jars`` fetches them ahead of time.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Final

from millrace.base.settings import Settings
from millrace.runtime.jars import Jar, exit_code, fetch_jars, locked_jars

DELTA_VERSION: Final = "4.4.0"
SPARK_VERSION: Final = "4.2"

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
"""Run-time dependencies of delta-spark 4.4.0 that Spark 4.2 does not ship."""


def jars_folder(settings: Settings) -> Path:
    """Return the cache folder for the jars of these versions."""
    return settings.cache_dir / "jars" / f"delta-{DELTA_VERSION}-spark-{SPARK_VERSION}"


def delta_jars(settings: Settings, *, deadline: float = 300) -> list[str]:
    """Return the paths of the jars for ``spark.jars``; fetch missing ones within `deadline` seconds.

    Raises InvalidSettings or DeadlineExceeded, as :func:`millrace.runtime.jars.fetch_jars` does.
    """
    return fetch_jars(
        JARS, jars_folder(settings), what="Spark's jars", ivy_settings=settings.ivy_settings, deadline=deadline
    )


def s3a_jars(settings: Settings, *, deadline: float = 300) -> list[str]:
    """Return the paths of the jars by which Spark reads S3; fetch missing ones, as :func:`delta_jars`."""
    text = (files("millrace.runtime.spark") / "s3a.lock").read_text(encoding="utf-8")
    return locked_jars(text, "s3a", settings, deadline=deadline)


def session_jars(settings: Settings) -> list[str]:
    """Return the paths of the jars of a session: Delta's, and S3A's if the tables are on S3."""
    return delta_jars(settings) + (s3a_jars(settings) if settings.tables.startswith("s3://") else [])


def main() -> int:
    """Fetch the jars and print their paths, one a line; return the exit code."""
    return exit_code(lambda: sys.stdout.write("\n".join(session_jars(Settings.load())) + "\n"))


if __name__ == "__main__":
    sys.exit(main())
