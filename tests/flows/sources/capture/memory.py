"""Read a captured lane to its end in a process of its own, and print its largest memory: for tests of large rows.

python -m tests.flows.sources.capture.memory DECLARATION DATA GROUP ROWS
"""

from __future__ import annotations

import json
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
    place, count, largest = 0, 0, 0
    print("ready", flush=True)
    while count < rows:
        (ends,) = source.ends().values()
        if place >= ends.high:
            time.sleep(0.05)
            continue
        for batch in reader.batches(max(place, ends.low), ends.high, LIMITS):
            found = batch.records or ()
            largest = max(largest, sum(len(each.value or b"") for each in found))
            count, place = count + len(found), batch.end
        source.mirror([(topic, 0, place)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps({"rows": count, "peak_mib": peak, "largest_batch": largest}), flush=True)
    feeder.close()


def started(declared: Any, password: str, settings: Settings, group: str, rows: int) -> subprocess.Popen[str]:
    """Start the program; it has printed a line when the capture runs."""
    told = {**declared.model_dump(mode="json"), "password": password}
    command = [sys.executable, "-m", __name__, json.dumps(told), str(settings.data_dir), group, str(rows)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
