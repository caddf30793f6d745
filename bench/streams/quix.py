"""Keyed operators against Quix Streams, which reads JSON from Kafka by one worker, with state in RocksDB, no changelog.

It needs other versions of confluent-kafka and pydantic than this project, so uv creates an environment for it
(:data:`WANTED`) in the bench's folder. The cost of its reading alone is measured too; ours reads Arrow from memory. The
answers are verified to be equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.streams.events import batches
from bench.streams.keyed_operators import in_process, timed
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.streams.keyed.operator import Operator
from millrace.streams.operators.patterns import Patterns

WANTED: Final = "quixstreams==3.28.1"
SECONDS: Final = 500


def compare_with_quix(folder: Path, operator: Operator, *, count: int, keys: int, size: int) -> dict[str, Any]:
    """Return events/s and CPU per event of each, and of Quix's reading alone, in one round: warmth does not matter."""
    folder.mkdir(parents=True, exist_ok=True)
    python = _environment(folder / "quix")
    given = list(batches(count, keys=keys, size=size))
    mine, (seconds, cpu) = timed(lambda: in_process(operator, given))
    question = "rising" if isinstance(operator, Patterns) else "last"
    with KafkaBroker(folder / "kafka", settings=Settings(), heap="512m").start() as broker:
        # The broker makes no topic for who only writes to it.
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic("events", 1, 1)])["events"].result(SECONDS)
        producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 20})
        for each in given:
            for row in each.to_pylist():
                while True:
                    try:
                        producer.produce("events", json.dumps(row), str(row["k"]), partition=0)
                        break
                    except BufferError:
                        producer.poll(0.1)
        producer.flush(120)
        found = {each: _asked(python, broker.address, each, count, folder) for each in ("read", question)}
    theirs = [tuple(each) for each in json.loads((folder / f"{question}.json").read_text())]
    assert Counter(mine) == Counter(theirs), "both answer the same question"
    return {
        "events": count,
        "keys": keys,
        "answers": len(mine),
        "ours_per_s": round(count / seconds),
        "quix_per_s": round(count / found[question]["seconds"]),
        "quix_reads_per_s": round(count / found["read"]["seconds"]),
        "ratio": round(found[question]["seconds"] / seconds, 1),
        "ours_cpu_us": round(cpu / count * 1e6, 2),
        "quix_cpu_us": round(found[question]["cpu"] / count * 1e6, 2),
        "quix_reads_cpu_us": round(found["read"]["cpu"] / count * 1e6, 2),
    }


def _environment(folder: Path) -> Path:
    """The Python that has Quix Streams."""
    uv = Path(sys.executable).with_name("uv")
    python = folder / "bin" / "python"
    subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, folder], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", python, WANTED], check=True)
    return python


def _asked(python: Path, address: str, question: str, count: int, folder: Path) -> dict[str, float]:
    program = Path(__file__).with_name("quix_program.py")
    command = [str(python), str(program), address, "events", question, str(count), str(folder)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, env=env)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found
