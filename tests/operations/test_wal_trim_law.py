"""Law 7 under retention.

Whatever was trimmed and when, the collection and the WAL's account of itself come out the same.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.checkpoint.staged_trim import imported_files
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from tests.operations.log_maker import Things

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "insert",
                "delete",
                "begin",
                "body",
                "commit",
                "import",
                "replace",
                "flush",
                "flush",
                "checkpoint",
                "checkpoint",
            ]
        ),
        st.integers(0, 1),
    ),
    min_size=8,
    max_size=30,
)


class Story:
    """A deployment and a model of it: what is visible once everything is flushed."""

    def __init__(self, folder: Path) -> None:
        self.things = Things(folder)
        self.settings = replace(self.things.settings, wal_retention=0.001)
        self.visible: dict[int, str] = {}
        self.open: dict[str, dict[int, str]] = {}
        self.txn = 0
        self.ids: dict[str, int] = {}

    def step(self, kind: str, number: int) -> None:
        collection = self.things.collection
        vchannel = collection.vchannels[number]
        if kind in ("insert", "body"):
            place = self.things.next[vchannel]
            self.things.next[vchannel] = place + 1
            (key,) = collection.keys_of(vchannel, place + 1)[place:]
            in_txn = kind == "body" and vchannel in self.open
            txn = self.ids[vchannel] if in_txn else 0
            rows: dict[str, list[object]] = {"id": [key], "body": [f"{kind} {key}"]}
            collection.append(vchannel, collection.insert(rows, vchannel=vchannel, txn=txn))
            (self.open[vchannel] if in_txn else self.visible)[key] = f"{kind} {key}"
        elif kind == "delete":
            mine = [key for key in self.visible if collection.home(key) == vchannel]
            if mine:
                collection.append(vchannel, collection.delete(mine[:1], vchannel=vchannel))
                del self.visible[mine[0]]
        elif kind == "begin" and vchannel not in self.open:
            self.open[vchannel] = {}
            self.txn += 1
            self.ids[vchannel] = self.txn
            collection.append(vchannel, collection.begin(vchannel, self.txn))
        elif kind == "commit" and vchannel in self.open:
            collection.append(vchannel, collection.end(vchannel, self.ids[vchannel]))
            self.visible.update(self.open.pop(vchannel))
        elif kind in ("import", "replace"):
            self.load(vchannel, replace=kind == "replace")
        elif kind == "flush":
            self.things.maker.commit()
            flush_to_end(self.settings)
        elif kind == "checkpoint":
            self.things.maker.commit()
            assert checkpoint(self.settings, self.things.log, CheckpointParams(), Progress()).ok

    def load(self, vchannel: str, *, replace: bool) -> None:
        """Import two rows, in a file each. It fails the transaction that is open there."""
        collection, place = self.things.collection, self.things.next[vchannel]
        self.things.next[vchannel] = place + 2
        rows = {key: f"loaded {key}" for key in collection.keys_of(vchannel, place + 2)[place:]}
        files = [
            collection.stage(f"{vchannel}-{key}.parquet", {"id": [key], "body": [body]}) for key, body in rows.items()
        ]
        collection.append(vchannel, collection.imported(files, vchannel=vchannel, replace=replace))
        self.open.pop(vchannel, None)
        if replace:
            self.visible = {key: body for key, body in self.visible.items() if collection.home(key) != vchannel}
        self.visible.update(rows)

    def finish(self) -> None:
        """Bring everything in, move every PChannel's tick behind it, and hold the deployment against the model."""
        for vchannel in list(self.open):
            self.step("commit", self.things.collection.vchannels.index(vchannel))
        # In a millisecond of its own: ticks of one millisecond differ by channel, and a read
        # goes up to the least of them.
        now = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 <= now:
            pass
        for pchannel in self.things.maker.pchannels:
            self.things.maker.append(pchannel, [builders.flush_all(term=1)])
        self.step("flush", 0)
        self.step("checkpoint", 0)
        found = {row["id"]: row["body"] for row in read_arrow(self.settings, 1).to_pylist()}
        assert found == self.visible
        snapshot, wal = WalSnapshot.open(Path(self.settings.wal_uri)), WalTable.open(Path(self.settings.wal_uri))
        assert snapshot is not None
        assert all(verify_channel(snapshot, wal, None, name).ok for name in wal.pchannels())
        needed = {
            path
            for name in wal.pchannels()
            for messages in snapshot.messages(name, types=["IMPORT"])
            for path in imported_files(messages)
        }
        assert {path.name for path in self.settings.staged_path.glob("*.parquet")} == needed
        for report in verify_collections(self.settings).values():
            assert report.ok, report


# Without shrinking: an example takes about a second.
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(STEPS)
def test_a_collection_comes_out_the_same_whatever_was_trimmed(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder))
        try:
            for kind, number in steps:
                story.step(kind, number)
            story.finish()
        finally:
            story.things.close()
