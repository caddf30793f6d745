#!/bin/bash
# Compile the sources in java/ into java/capture-engine.jar; the same sources give the same bytes.
# The jar names the sources' digest, which a test compares. Usage: tools/capture_jar.sh PYTHON [TARGET].
set -eu
python=$(command -v "$1")
[[ $python == /* ]] || python=$PWD/$python
folder="$(cd "$(dirname "$0")/.." && pwd)/include/millrace/flows/sources/capture"
target=$(realpath -m "${2:-$folder/java/capture-engine.jar}")
paths=$(PYTHONPATH="$folder/../../../.." "$python" -m millrace.flows.sources.capture.engine)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
java=$(PYTHONPATH="$folder/../../../.." "$python" -m millrace.runtime.java)/bin/java
"$java" -m jdk.compiler/com.sun.tools.javac.Main -source 17 -target 17 -Xlint:-options -proc:none -nowarn -cp "$paths" -d "$build" $(find "$folder/java" -name "*.java" | sort)
cd "$build"
# Python's zipfile, since jar writes the time of each file.
"$python" - "$target" "$folder/java" <<'PYTHON'
import hashlib
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

with ZipFile(sys.argv[1], "w", ZIP_DEFLATED) as jar:
    content = {str(path): path.read_bytes() for path in sorted(Path().rglob("*.class"))}
    sources = b"".join(path.read_bytes() for path in sorted(Path(sys.argv[2]).rglob("*.java")))
    content["META-INF/source.sha256"] = hashlib.sha256(sources).hexdigest().encode()
    for name, data in content.items():
        jar.writestr(ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, ZIP_DEFLATED)
PYTHON
