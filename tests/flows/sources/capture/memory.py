"""Read a captured lane to its end in a process of its own, and print its largest memory: for tests of large rows.

CAPTURED='{"kind": …}' python -m tests.flows.sources.capture.memory DATA GROUP ROWS
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from millrace.base.settings import Settings
from millrace.flows.range_host.task import TRANSACTION_BYTES
from millrace.flows.registry import feeder_of, reader_of, source_kinds, source_of
from millrace.flows.sources.source import Limits

DECLARED = "CAPTURED"
"""The variable with the declaration, and the password, which a command line would show."""
LIMITS = Limits(40_000, 20 << 20, 0.1, TRANSACTION_BYTES)
"""Those of a worker by default."""


def main(declaration: str, folder: str, group: str, rows: int) -> None:
    told = json.loads(declaration)
    declared: Any = source_kinds()[told["kind"]].model.model_validate(told)
    settings = Settings(data_dir=Path(folder))
    feeder = feeder_of(declared, settings, group=group)
    assert feeder is not None
    source = source_of(declared, settings, group=group, standing={})
    (topic,) = declared.names
    reader = reader_of(declared, settings, group=group, topic=topic, partition=0)
    place, largest = 0, 0
    keys: set[Any] = set()  # a row that changed between snapshot and log comes from both
    print("ready", flush=True)
    while len(keys) < rows:
        (ends,) = source.ends().values()
        if place >= ends.high:
            time.sleep(0.05)
            continue
        for batch in reader.batches(max(place, ends.low), ends.high, LIMITS):
            found = batch.records or ()
            largest = max(largest, sum(len(each.value or b"") for each in found))
            keys |= {each.key for each in found if each.value is not None}
            place = batch.end
        source.mirror([(topic, 0, place)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps({"rows": len(keys), "peak_mib": peak, "largest_batch": largest}), flush=True)
    feeder.close()


def started(declared: Any, password: str, settings: Settings, group: str, rows: int) -> subprocess.Popen[str]:
    """Start the program; it has printed a line when the capture runs."""
    told = {**declared.model_dump(mode="json"), "password": password}
    command = [sys.executable, "-m", __name__, str(settings.data_dir), group, str(rows)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, DECLARED: json.dumps(told)})


if __name__ == "__main__":
    main(os.environ[DECLARED], sys.argv[1], sys.argv[2], int(sys.argv[3]))
