"""The quality gate: says what is wrong with a run of the tests, and ends with 1 where anything is.

    python tools/pipelines/quality_gate.py build/tests.xml

Every test passed, none was skipped, at least as many ran as belong to pipelines; and SonarQube's own gate
(SONAR_STATUS) is OK where it says anything.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

MIN_TESTS = 200
"""A run of fewer is a run of which something was left out."""


def problems(report: Path, sonar: str) -> list[str]:
    """What keeps it from being good, in words."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    found = [f"{counts[name]} {name}" for name in ("failures", "errors", "skipped") if counts[name]]
    if counts["tests"] < MIN_TESTS:
        found.append(f"{counts['tests']} tests ran, and there are {MIN_TESTS} at least")
    if sonar and not sonar.startswith("$(") and sonar != "OK":
        found.append(f"SonarQube's gate is {sonar}")
    return found


def main() -> int:
    found = problems(Path(sys.argv[1]), os.environ.get("SONAR_STATUS", ""))
    sys.stdout.write("\n".join(found or ["the quality gate is passed"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
