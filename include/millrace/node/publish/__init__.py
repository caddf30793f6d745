"""Published tables: each collection as a plain Delta table that holds what a read at one tick gives (docs).

- `progress`: the tick up to which the tables of a collection are whole, from one look at `wal` and the checkpoints.
- `shape`: the columns of a published table, and files whose values have to move to the columns of now.
- `positions`: the rows of a file that are dead at a tick, by position.
- `publisher`: one publish of one collection: pin, judge, check, commit.
- `definition`: the loop that publishes what changed (millrace.node.range_loop).
"""
