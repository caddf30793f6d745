"""Four streams over the collection ``numbers`` and a topic: a copy, windows, a row pattern, and the topic's records."""

from __future__ import annotations

from pathlib import Path

PATTERN = (
    "PARTITION BY k ORDER BY at, id MEASURES FIRST(A.id) AS first, LAST(B.id) AS last"
    " PATTERN (A B B) WITHIN INTERVAL '1' HOUR DEFINE B AS v > PREV(v)"
)
DECLARATIONS = """
flows:
  - name: copied
    group: all
    source: {kind: collection, collection: numbers, columns: [id, k, v]}
    sink: {kind: delta, table: copied}
  - name: hourly
    group: all
    source:
      kind: collection
      collection: numbers
      columns: [k, at, v]
      watermark: {column: at, delay: 1 hour}
    transform:
      sql: >-
        select k, window.start as hour, count(*) as rows, sum(v) as total
        from numbers group by k, window(at, '1 hour')
      output_mode: update
    sink: {kind: collection, collection: hourly, mode: upsert, create: true, key: "k, hour"}
  - name: rises
    group: all
    source:
      kind: collection
      collection: numbers
      columns: [id, k, at, v]
      watermark: {column: at, delay: 1 hour}
    transform:
      operator:
        pattern:
          match_recognize: >-
            {pattern}
    sink: {kind: collection, collection: rises, create: true}
  - name: arrived
    group: all
    source: {kind: kafka, bootstrap: ["{kafka}"], topics: ["{topic}"], columns: {n: int64}}
    sink: {kind: collection, collection: arrived, create: true}
    errors: {collection: dead}
"""


def write_declarations(folder: Path, *, kafka: str, topic: str) -> Path:
    """Write the declarations into `folder`, and return their file."""
    file = folder / "flows.yaml"
    text = DECLARATIONS.replace("{kafka}", kafka).replace("{topic}", topic).replace("{pattern}", PATTERN)
    file.write_text(text, encoding="utf-8")
    return file
