"""The quality gate: report problems of a test run, and exit with 1 if there are any.

    python tools/shipping/quality_gate.py build/tests.xml build/coverage.xml

Every test must pass, none may be skipped, and at least as many must run as belong to pipelines. The tests must run
enough of the lines and branches of each package. Both reports must be of one run: coverage that was measured before the
tests began is another run's. SonarQube's own gate (SONAR_STATUS) must be OK if it is set.
"""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

MIN_TESTS = 140
"""A run with fewer tests left something out."""
MIN_COVERAGE = 0.85
"""Share of all lines and branches that the tests must run (coverage.py's total)."""
MIN_PACKAGE = 0.6
"""The same for the lines of each package."""


def problems(report: Path, coverage: Path, sonar: str) -> list[str]:
    """Return a message for each problem of a JUnit report, a Cobertura report and SonarQube's status."""
    try:
        tests, covered = (ElementTree.parse(each).getroot() for each in (report, coverage))
    except (OSError, ElementTree.ParseError) as error:
        return [f"{report} or {coverage} cannot be read, so nothing was checked: {error}"]
    suites = tests.iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    found = [f"{counts[name]} {name}" for name in ("failures", "errors", "skipped") if counts[name]]
    if counts["tests"] < MIN_TESTS:
        found.append(f"{counts['tests']} tests ran, expected at least {MIN_TESTS}")
    found += _coverage_problems(covered)
    found += _age_problems(tests, covered)
    if sonar and not sonar.startswith("$(") and sonar != "OK":
        found.append(f"SonarQube's gate is {sonar}")
    return found


def _coverage_problems(root: ElementTree.Element) -> list[str]:
    def number(name: str) -> int:
        return int(root.get(name, 0))

    valid = number("lines-valid") + number("branches-valid")
    if not valid:
        return ["no line was measured"]
    share = (number("lines-covered") + number("branches-covered")) / valid
    found = [f"{share:.1%} of lines and branches ran, expected at least {MIN_COVERAGE:.0%}"]
    found = found if share < MIN_COVERAGE else []
    for package in root.iter("package"):
        rate = float(package.get("line-rate", 0))
        if rate < MIN_PACKAGE:
            found.append(f"{package.get('name')}: {rate:.1%} of its lines ran, expected at least {MIN_PACKAGE:.0%}")
    return found


def _age_problems(tests: ElementTree.Element, covered: ElementTree.Element) -> list[str]:
    try:
        begun = min(datetime.fromisoformat(each.get("timestamp", "")).timestamp() for each in tests.iter("testsuite"))
        measured = int(covered.get("timestamp", "")) / 1000
    except ValueError:
        return ["a report does not say when it was made"]
    return ["the coverage was measured before the tests began: it is an earlier run's"] if measured < begun else []


def main() -> int:
    if len(sys.argv) != 3:
        sys.stderr.write("usage: quality_gate.py JUNIT_XML COVERAGE_XML\n")
        return 2
    found = problems(Path(sys.argv[1]), Path(sys.argv[2]), os.environ.get("SONAR_STATUS", ""))
    sys.stdout.write("\n".join(found or ["quality gate passed"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
