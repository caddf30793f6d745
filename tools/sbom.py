"""Write a software bill of materials (CycloneDX 1.6, JSON) and a report of licences.

    python tools/sbom.py FOLDER      writes FOLDER/sbom.cdx.json and FOLDER/licences.md

The Python packages are those of requirements.txt and tools/uv.txt that this system installs, with the digests of the
lock; their licences are those that the installed packages state. The jars are Delta's and those inside pyspark; the
jars of brokers for tests and demos are listed as optional. The same locks and packages give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import millrace
from millrace.brokers.jars import read_lock
from millrace.brokers.registry import LOG_BROKERS
from millrace.flows.sources.capture.engine import debezium_lock
from millrace.runtime.jars import Jar
from millrace.runtime.spark.jars import JARS

ROOT: Final = Path(__file__).resolve().parents[1]
UNKNOWN: Final = "not stated"
_NAMESPACE: Final = uuid.UUID("6f1d7a1e-5d0c-4c39-9f0a-6d1d5a3c7e11")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_JAR: Final = re.compile(r"(.+?)-(\d[^/]*)\.jar")

Component = dict[str, Any]


def pinned(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (name, version, digests) of the lock's packages that this system installs."""
    for block in path.read_text().replace("\\\n", " ").splitlines():
        text = block.partition(" --hash")[0].strip()
        if text and not text.startswith("#"):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                (version,) = requirement.specifier
                yield canonicalize_name(requirement.name), version.version, _HASH.findall(block)


def licence_of(found: Distribution) -> tuple[str, bool]:
    """Return the licence that a package states, and whether it is an SPDX expression."""
    if expression := found.metadata.get("License-Expression"):
        return expression, True
    classifiers = found.metadata.get_all("Classifier") or []
    named = [
        each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ") and each.count("::") > 1
    ]
    if named:
        return " or ".join(sorted(set(named))), False
    first = next((line.strip() for line in (found.metadata.get("License") or "").splitlines() if line.strip()), "")
    return first[:100] or UNKNOWN, False


def python_components() -> Iterator[tuple[Component, list[str]]]:
    """Yield each package with the names of its dependencies."""
    for name, version, digests in [*pinned(ROOT / "requirements.txt"), *pinned(ROOT / "tools" / "uv.txt")]:
        licence, asked = (UNKNOWN, False), list[str]()
        try:
            found = distribution(name)
            licence = licence_of(found)
            wanted = map(Requirement, found.requires or [])
            asked = sorted(
                {
                    canonicalize_name(each.name)
                    for each in wanted
                    if each.marker is None or each.marker.evaluate({"extra": ""})
                }
            )
        except PackageNotFoundError:
            pass  # uv is missing where pip had to install everything
        words = {"expression": licence[0]} if licence[1] else {"license": {"name": licence[0]}}
        purl = f"pkg:pypi/{name}@{quote(version)}"
        made = _component(name, version, purl, digests)
        yield made | {"licenses": [words]}, asked


def jar_components(jars: Iterable[Jar], *, scope: str) -> Iterator[Component]:
    """Yield pinned jars."""
    for jar in jars:
        purl = f"pkg:maven/{jar.organisation}/{jar.name}@{quote(jar.version)}"
        yield _component(jar.name, jar.version, purl, [jar.sha256]) | {"group": jar.organisation, "scope": scope}


def spark_jars() -> Iterator[Component]:
    """Yield the jars inside the package pyspark."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    for path in sorted((Path(spec.origin).parent / "jars").glob("*.jar")):
        match = _JAR.fullmatch(path.name)
        name, version = match.groups() if match else (path.stem, "")
        group = _group(path, name)
        purl = f"pkg:maven/{group}/{name}@{quote(version)}" if group else f"pkg:generic/{name}@{quote(version)}"
        made = _component(name, version, purl, [hashlib.sha256(path.read_bytes()).hexdigest()])
        yield made | ({"group": group} if group else {})


def _group(path: Path, name: str) -> str:
    """Return the Maven group that a jar states; empty if it states none."""
    with zipfile.ZipFile(path) as jar:
        found = [each.split("/") for each in jar.namelist() if each.endswith("/pom.properties")]
    return next((parts[2] for parts in found if len(parts) == 5 and parts[3] == name), "")


def _component(name: str, version: str, purl: str, digests: Iterable[str]) -> Component:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": each} for each in sorted(set(digests))],
    }


def bill() -> dict[str, Any]:
    """Return the bill of materials."""
    packages = list(python_components())
    refs = {package["name"]: package["bom-ref"] for package, _ in packages}
    bundled = list(spark_jars())
    found = [package for package, _ in packages] + bundled + list(jar_components(JARS, scope="required"))
    for kind in sorted(LOG_BROKERS):
        found += jar_components(read_lock(kind), scope="optional")
    found += jar_components(debezium_lock(), scope="optional")
    components = {each["bom-ref"]: each for each in reversed(found)}  # the first of two places of a jar counts
    own = f"pkg:pypi/millrace@{millrace.__version__}"
    direct = sorted(
        refs[canonicalize_name(Requirement(line).name)]
        for text in (ROOT / "requirements.in").read_text().splitlines()
        if (line := text.partition("#")[0].strip()) and canonicalize_name(Requirement(line).name) in refs
    )
    edges = {own: direct} | {
        package["bom-ref"]: [refs[each] for each in asked if each in refs] for package, asked in packages
    }
    edges[refs["pyspark"]] = sorted({*edges[refs["pyspark"]], *(each["bom-ref"] for each in bundled)})
    listed = sorted(components.values(), key=lambda each: str(each["bom-ref"]))
    digest = hashlib.sha256(json.dumps([listed, edges], sort_keys=True).encode()).hexdigest()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "millrace",
                "version": millrace.__version__,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": listed,
        "dependencies": [{"ref": ref, "dependsOn": sorted(set(asked))} for ref, asked in sorted(edges.items())],
    }


def licences(document: dict[str, Any]) -> str:
    """Return the report: the number of packages for each licence, and the licence of each package."""
    found = {
        f"{each['name']} {each['version']}": each["licenses"][0].get("expression")
        or each["licenses"][0]["license"]["name"]
        for each in document["components"]
        if "licenses" in each
    }
    count = Counter(found.values())
    lines = ["# Licences of the Python packages", "", "As each package states it. Made by `make sbom`.", ""]
    lines += ["| licence | packages |", "|---|---|"]
    lines += [f"| {name} | {number} |" for name, number in sorted(count.items(), key=lambda each: (-each[1], each[0]))]
    lines += [
        "",
        "| package | licence |",
        "|---|---|",
        *(f"| {name} | {words} |" for name, words in sorted(found.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    document = bill()
    (folder / "sbom.cdx.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "licences.md").write_text(licences(document))
    sys.stdout.write(f"{folder}/sbom.cdx.json: {len(document['components'])} components; {folder}/licences.md\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
