"""The quality gate: report problems of a test run, and exit with 1 if there are any.

    python tools/pipelines/quality_gate.py build/tests.xml

Every test must pass, none may be skipped, and at least as many must run as belong to pipelines. SonarQube's own gate
(SONAR_STATUS) must be OK if it is set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

MIN_TESTS = 200
"""A run with fewer tests left something out."""


def problems(report: Path, sonar: str) -> list[str]:
    """Return a message for each problem."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    found = [f"{counts[name]} {name}" for name in ("failures", "errors", "skipped") if counts[name]]
    if counts["tests"] < MIN_TESTS:
        found.append(f"{counts['tests']} tests ran, expected at least {MIN_TESTS}")
    if sonar and not sonar.startswith("$(") and sonar != "OK":
        found.append(f"SonarQube's gate is {sonar}")
    return found


def main() -> int:
    found = problems(Path(sys.argv[1]), os.environ.get("SONAR_STATUS", ""))
    sys.stdout.write("\n".join(found or ["quality gate passed"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
