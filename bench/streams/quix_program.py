"""The part of Quix Streams in bench.streams.quix, run by a Python that has Quix and nothing of Millrace.

    quix_program.py <address> <topic> <rising|last|read> <events> <folder>

Prints its seconds and CPU seconds from the first event to the last.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quixstreams import Application  # type: ignore[import-not-found] # in an environment of its own


def main(address: str, topic: str, question: str, count: int, folder: Path) -> None:
    app = Application(
        broker_address=address,
        consumer_group=uuid.uuid4().hex,
        auto_offset_reset="earliest",
        state_dir=str(folder / uuid.uuid4().hex),
        use_changelog_topics=False,
        loglevel="WARNING",
    )
    answers: list[tuple[Any, ...]] = []
    clocks: list[tuple[float, float]] = []
    seen = 0

    def counted(step: Callable[..., None]) -> Callable[..., bool]:
        def take(value: dict[str, Any], *state: Any) -> bool:
            nonlocal seen
            seen += 1
            if seen in (1, count):
                clocks.append((time.perf_counter(), time.process_time()))
            step(value, *state)
            return True

        return take

    def rising(value: dict[str, Any], state: Any) -> None:
        one, two = state.get("last", [None, None])
        if one is not None and one < two < value["v"]:
            answers.append((value["k"], one, value["v"]))
        state.set("last", [two, value["v"]])

    def last(value: dict[str, Any], state: Any) -> None:
        if value["right"]:
            state.set("last", value["v"])
        else:
            answers.append((value["k"], value["t"], state.get("last")))

    frame = app.dataframe(app.topic(topic, key_deserializer="str", value_deserializer="json"))
    if question == "read":
        frame = frame.apply(counted(lambda value: None))
    else:
        frame = frame.apply(counted(rising if question == "rising" else last), stateful=True)
    app.run(count=count, timeout=120.0, collect=False)
    (begun, cpu), (ended, used) = clocks
    (folder / f"{question}.json").write_text(json.dumps(answers))
    print(json.dumps({"seconds": ended - begun, "cpu": used - cpu}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
