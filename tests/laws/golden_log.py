"""The golden log of a chain version: entries as bytes, and what the chain made of them when the version was fixed.

    PYTHONPATH=include:. python -m tests.laws.golden_log

writes golden/chain-v<version>.json, once: it refuses to replace the file of a version, because a chain that gives other
rows for the same log is another version (docs/chain.md) and has a file of its own. The exception is a version in the
making, which no release has had: its file is made again with each step of the work.

The logs are drawn as the laws draw them, and chosen so that together they show each
message type, reason and seal policy.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from millrace.message.ids import LogId
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.state import ChannelState
from tests.laws.parts import Row
from tests.laws.real import Ran, plain, run
from tests.laws.scribe import LOGS, Scribe, Written

FOLDER = Path(__file__).parent / "golden"
PATH = FOLDER / f"chain-v{CHAIN_VERSION}.json"
IN_THE_MAKING: set[int] = set()
"""Versions whose log is made again until the work is done."""
DRAWN = 6_000
MOST_BYTES = 12_000
"""Of a chosen log: a short one that shows something says it better."""


def shown(row: Row) -> str:
    """What a row is an example of."""
    if row["reason"] is not None:
        return f"!{row['reason']}"
    if row["type"] == "FLUSH":
        return f"FLUSH {plain(row)['payload']['policy']}"
    if row["type"] == "SCHEMA_CHANGE" and (changes := json.loads(row["payload"]).get("changes")):
        return f"SCHEMA_CHANGE {' '.join(each['op'] for each in changes)}"
    return f"ROLLBACK_TXN {row['detail']}" if row["detail"] else str(row["type"])


def rows_digest(rows: list[Row]) -> str:
    """Of the rows without a rejection's words, which may be worded better at any time."""
    # A row without a principal is as it was before there were any.
    shown = [{k: v for k, v in plain(row).items() if k != "principal" or v is not None} for row in rows]
    plainly = [{k: v.hex() if isinstance(v, bytes) else v for k, v in row.items()} for row in shown]
    return hashlib.sha256(json.dumps(plainly, sort_keys=True).encode()).hexdigest()[:16]


def state_digest(state: ChannelState) -> str:
    """Of the state's canonical text, without its version byte."""
    return hashlib.sha256(state.to_bytes()[1:]).hexdigest()[:16]


def described(written: Written, ran: Ran) -> dict[str, Any]:
    """A log in the golden form: per entry its stamp, bytes, what came out, and the digest of that."""
    entries = []
    for log_id, physical_ms, value in written.entries:
        rows = [row for row in ran.rows if row["entry"] == log_id.entry]
        entry: dict[str, Any] = {"ledger": log_id.ledger} if log_id.ledger else {}
        entry |= {
            "ms": physical_ms,
            "hex": value.hex(),
            "rows": [shown(row) for row in rows],
            "digest": rows_digest(rows),
        }
        entries.append(entry)
    return {"entries": entries, "state": state_digest(ran.state)}


def read_golden(path: Path = PATH) -> list[dict[str, Any]]:
    """The logs of a golden file."""
    logs: list[dict[str, Any]] = json.loads(path.read_text())["logs"]
    return logs


def as_written(log: dict[str, Any]) -> Written:
    """A golden log as one that can be run."""
    numbered = enumerate(log["entries"], 1)
    return Written(
        entries=[(LogId(entry.get("ledger", 0), n), entry["ms"], bytes.fromhex(entry["hex"])) for n, entry in numbered]
    )


def features(log: dict[str, Any]) -> set[str]:
    return {feature for entry in log["entries"] for feature in entry["rows"]}


def choose() -> list[dict[str, Any]]:
    """Few logs that show everything that any of the drawn ones shows."""
    drawn: list[tuple[set[str], dict[str, Any]]] = []

    @settings(
        max_examples=DRAWN,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(LOGS)
    def draw(log: Scribe) -> None:
        if sum(len(value) for _, _, value in log.written.entries) <= MOST_BYTES:
            one = described(log.written, run(log.written))
            drawn.append((features(one), one))

    draw()
    wanted = set[str]().union(*(found for found, _ in drawn))
    chosen: list[dict[str, Any]] = []
    while wanted:
        found, best = max(drawn, key=lambda each: len(each[0] & wanted))
        wanted -= found
        chosen.append(best)
    return chosen


def main() -> None:
    if PATH.exists() and CHAIN_VERSION not in IN_THE_MAKING:
        raise SystemExit(f"{PATH.name} exists: a chain that gives other rows needs another CHAIN_VERSION")
    PATH.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(log, separators=(",", ":")) for log in choose())
    PATH.write_text(f'{{"chain_version":{CHAIN_VERSION},"logs":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
