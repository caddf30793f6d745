"""A process that changes one collection, beside others that do, and may be killed at a failpoint of the coordinator.

    python ddl_process.py <number> <turns>

The data folder comes from the environment (MILLRACE_DATA); the log's server is somebody else's to start.
"""

from __future__ import annotations

import contextlib
import sys

from millrace.base.errors import AppendRejected
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.coord.coordinator import Coordinator
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from tests.coord.ddl.rig import ConnectionAppender


def main() -> None:
    """Add partitions and fields of its own, and partitions that all want."""
    number, turns = sys.argv[1], int(sys.argv[2])
    settings = Settings.load()
    with (
        AppendClient.connect(settings.data_dir, start=False) as append,
        Coordinator(
            settings, log=append.service, append=ConnectionAppender(append, settings.append_deadline)
        ) as coordinator,
    ):
        for turn in range(turns):
            coordinator.alter("c", [AddField(FieldSpec(f"f{number}_{turn}", "string", True))])
            coordinator.create_partition("c", f"p{number}_{turn}")
            with contextlib.suppress(AppendRejected):  # one of them makes it
                coordinator.create_partition("c", f"shared{turn}")


if __name__ == "__main__":
    main()
