"""The bill of materials has everything that the locks name, and says it as CycloneDX has it.

What installs it is pinned, too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from millrace.runtime.spark.jars import JARS

ROOT = Path(__file__).resolve().parents[1]
PINNED = re.compile(r"^([a-z0-9._-]+)==(\S+)", re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sbom")
    for name in ("one", "two"):
        command = [sys.executable, str(ROOT / "tools" / "sbom.py"), str(folder / name)]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def document(made: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made / "one" / "sbom.cdx.json").read_text())
    return found


@pytest.mark.slow
def test_every_package_of_the_lock_is_there_with_its_digests_and_its_licence(document: dict[str, Any]) -> None:
    found = {each["purl"]: each for each in document["components"]}
    lock = (ROOT / "requirements.txt").read_text()
    lines = [line.removesuffix("\\").strip() for line in lock.split("\n") if re.match(r"[a-z0-9]", line)]
    # Those for this Python: some are for others alone.
    here = [each for line in lines if (each := Requirement(line)).marker is None or each.marker.evaluate()]
    names = [(each.name, str(each.specifier).removeprefix("==")) for each in here]
    assert len(names) > 100
    for name, version in [*names, *PINNED.findall((ROOT / "tools" / "uv.txt").read_text())]:
        if name in {"cffi", "greenlet"}:
            continue  # by the interpreter
        each = found[f"pkg:pypi/{name}@{version.replace('+', '%2B')}"]
        assert each["hashes"]
        assert all(digest["content"] in lock for digest in each["hashes"]) or name == "uv"
    stated = [each["licenses"][0] for each in document["components"] if each["purl"].startswith("pkg:pypi/")]
    unknown = [each for each in stated if each.get("license", {}).get("name") == "not stated"]
    assert len(unknown) <= 1, "uv, where pip did its work"


def test_jars_are_there_too_and_those_of_brokers_are_optional(document: dict[str, Any]) -> None:
    found = {each["purl"]: each for each in document["components"]}
    for jar in JARS:
        assert found[f"pkg:maven/{jar.organisation}/{jar.name}@{jar.version}"]["hashes"][0]["content"] == jar.sha256
    assert any(each["name"].startswith("spark-core") for each in document["components"])
    optional = {each["name"] for each in document["components"] if each.get("scope") == "optional"}
    assert {"kafka_2.13", "pulsar-broker"} <= optional


def test_it_is_shaped_as_cyclonedx_asks(document: dict[str, Any]) -> None:
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"])
    refs = [each["bom-ref"] for each in document["components"]]
    assert len(set(refs)) == len(refs)
    known = {*refs, document["metadata"]["component"]["bom-ref"]}
    for edge in document["dependencies"]:
        assert {edge["ref"], *edge["dependsOn"]} <= known
    own = next(each for each in document["dependencies"] if each["ref"].startswith("pkg:pypi/millrace@"))
    assert {each.partition("@")[0] for each in own["dependsOn"]} >= {"pkg:pypi/pyspark", "pkg:pypi/deltalake"}


def test_the_same_locks_give_the_same_bytes(made: Path) -> None:
    for name in ("sbom.cdx.json", "licences.md"):
        assert (made / "one" / name).read_bytes() == (made / "two" / name).read_bytes()
    report = (made / "one" / "licences.md").read_text()
    assert "| pyspark 4.2.0 | " in report


def test_nothing_is_installed_without_a_digest() -> None:
    for script in ("make_venv.sh", "lock.sh"):
        text = (ROOT / "tools" / script).read_text().replace("\\\n", " ")
        installs = [line for line in text.splitlines() if re.search(r"\binstall\b.*(-r|uv)", line) and "pip" in line]
        assert installs
        assert all("--require-hashes" in line for line in installs), installs
    for lock in ("requirements.txt", "tools/uv.txt"):
        text = (ROOT / lock).read_text()
        assert "://" not in text, "a lock names no package host"
        blocks = re.split(r"\n(?=[a-z0-9])", text.partition("\n")[2].strip())
        assert all("--hash=sha256:" in block for block in blocks)
