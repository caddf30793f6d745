"""A pipeline made or deleted by the service's own calls, in a process that a failpoint ends.

The topics and the index are real, by name.

    python -m tests.crash.saga_process

Lines of JSON in: [data, create|delete|tend, failpoint]. The exit code of each process out.

One process has all that a call needs loaded and forks for each line, so that what takes seconds is done once; the fork
reads the failpoints anew. What lies in Kafka and OpenSearch is a folder with a file a thing here: a kill leaves it as
it leaves a broker, and no JVM is needed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module, reload
from pathlib import Path
from typing import Any

LOADED = (
    "alembic.command", "confluent_kafka.admin", "cryptography.fernet", "millrace.access.grants",
    "millrace.pipelines.api.management", "opensearchpy",
)  # fmt: skip
DECLARED = {
    "source": {"kind": "kafka", "bootstrap": ["127.0.0.1:9"], "topics": ["before", "in"]},
    "sink": {"kind": "opensearch", "hosts": ["http://127.0.0.1:9"], "index_base": "index", "create_index": True},
}
THINGS = {"index_base": ("index",), "topics": ("before", "in", "flights.errors")}


def make(management: Any, folder: Path) -> Any:
    """The real steps of this machine; of the servers' things a file each."""
    from millrace.pipelines.deploy.world import RealWorld

    class Files(RealWorld):
        def plan(self, step: str, record: Any) -> tuple[str, ...]:
            if step in THINGS:
                return tuple(each for each in THINGS[step] if not (folder / each).exists())
            return super().plan(step, record)

        def make(self, step: str, record: Any, things: tuple[str, ...]) -> None:
            if step in THINGS:
                for each in things:
                    (folder / each).touch()
            else:
                super().make(step, record, things)

        def undo(self, step: str, record: Any, things: tuple[str, ...]) -> tuple[str, ...]:
            if step not in THINGS:
                return super().undo(step, record, things)
            for each in things:
                (folder / each).unlink(missing_ok=True)
            return ()

    return Files(management.deployment, management._pipeline)


def main(data: Path, what: str) -> None:
    """One call of the service."""
    from millrace.access.grants import LOCAL_ADMIN
    from millrace.base.settings import Settings
    from millrace.pipelines.api.management import Management
    from millrace.pipelines.store.store import open_pipelines

    settings = Settings(data_dir=data)
    with open_pipelines(settings, env={}) as store:
        # A minute later, as the service that comes again waits: what another process is making is left alone.
        late = time.time() + (3600 if what == "tend" else 0)
        management = Management(settings, store, clock=lambda: late)
        management._world = make(management, data.parent / "things")
        if what == "create":
            management.create(LOCAL_ADMIN, "flights", DECLARED)
        elif what == "delete":
            management.delete(LOCAL_ADMIN, "flights")
        else:
            management.tend()


def serve() -> None:
    """A process for each line."""
    for name in LOADED:
        import_module(name)
    from millrace.base import failpoint as failpoints

    for line in sys.stdin:
        data, what, failpoint = json.loads(line)
        child = os.fork()
        if not child:
            os.environ[failpoints.VARIABLE] = failpoint
            code = 1
            try:
                reload(failpoints)
                main(Path(data), what)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
