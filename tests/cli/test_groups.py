"""`millrace groups`: members and lag, a reset while nobody reads, and a drop."""

from __future__ import annotations

import pyarrow as pa

from millrace.client.consume.delivery import CHANGES
from millrace.client.consume.queue_consumer import Task
from millrace.client.database import Database, connect
from millrace.node.ingest.definition import ingest_to_end
from tests.cli.deployment import Deployment
from tests.waiting import until


def read(database: Database, group: str) -> int:
    end = database.current_tick(database.definition("users").pchannels)
    rows = 0
    with database.consumer("users", group=group, filters=[CHANGES], until=end) as consumer:
        for delivery in consumer:
            rows += sum(each.rows.num_rows for each in delivery.changes())
            consumer.acknowledge(delivery)
    return rows


def test_a_group_is_listed_shown_reset_and_dropped(deployment: Deployment) -> None:
    assert "no consumer groups" in deployment.ok("groups", "list")
    deployment.create_users()
    with connect(settings=deployment.settings) as database:
        users = database.definition("users")
        names = {field.name: field for field in users.schema.fields}
        producer = database.new_producer()

        def insert(first: int) -> None:
            columns = {"id": list(range(first, first + 5))}
            columns |= {name: [None] * 5 for name in names if name not in columns}
            producer.insert(users, pa.table(columns, schema=users.schema.arrow()))

        insert(0)
        assert read(database, "mail") == 5
        insert(5)
        ingest_to_end(deployment.settings, database.log)
        [listed] = deployment.as_json("groups", "list")
        assert (listed["group"], listed["state"], listed["members"]) == ("mail", "empty", 0)
        assert listed["lag_messages"] >= 1
        assert listed["lag_s"] > 0
        with database.consumer("users", group="mail"):
            shown = deployment.as_json("groups", "show", "mail")
            assert shown["state"] == "active"
            assert sorted(shown["members"][0]["lanes"]) == sorted(users.vchannels)
            deployment.fails("GROUP_BUSY", "groups", "reset", "mail", "--to", "earliest")
            deployment.fails("GROUP_BUSY", "groups", "drop", "mail")
        assert "channel" in deployment.ok("groups", "reset", "mail", "--to", "earliest", "--dry-run")
        deployment.ok("groups", "reset", "mail", "--to", "latest")
        assert read(database, "mail") == 0
        deployment.ok("groups", "reset", "mail", "--to", "earliest", "--collection", "users")
        assert read(database, "mail") == 10
        [listed] = deployment.as_json("groups", "list")
        assert (listed["lag_messages"], listed["lag_s"]) == (0, 0.0)
        deployment.fails("INVALID_ARGUMENT", "groups", "reset", "mail", "--to", "soon")
        deployment.fails("INVALID_ARGUMENT", "groups", "reset", "nobody", "--to", "latest")
        deployment.fails("INVALID_ARGUMENT", "groups", "show", "nobody")
        assert "Dropped mail" in deployment.ok("groups", "drop", "mail")
        assert deployment.as_json("groups", "list") == []


def test_a_queue_shows_its_tasks_and_its_dead_letters_are_redriven_and_discarded(deployment: Deployment) -> None:
    with connect(settings=deployment.settings) as database:
        jobs = database.create_collection("jobs", {"id": "int64"}, key="id")
        jobs.insert([{"id": number} for number in range(4)])
        queue = database.consumer("jobs", group="work", mode="queue", dead_letters="jobs_dead", lease=30.0)
        tasks: list[Task] = []

        def came() -> bool:
            tasks.extend(task for _ in range(4) if (task := queue.poll(timeout=0.2)) is not None)
            return len(tasks) == 4

        until(came, "the tasks come")
        [listed] = [each for each in deployment.as_json("groups", "list") if each["group"] == "work"]
        assert (listed["mode"], listed["tasks"], listed["in_flight"]) == ("queue", 4, 4)
        assert listed["oldest_s"] > 0
        shown = deployment.as_json("groups", "show", "work")["queue"]
        assert (shown["collection"], shown["consumers"][0]["in_flight"]) == ("jobs", 4)
        assert "in flight" in deployment.ok("groups", "show", "work")
        for task in tasks[:3]:
            queue.reject(task, reason="no such customer" if task is tasks[0] else "it's late")
        queue.acknowledge(tasks[3])
        queue.close()
        of = ("work", "--letters", "jobs_dead")
        assert len(deployment.as_json("groups", "letters", *of)) == 3
        assert len(deployment.as_json("groups", "letters", *of, "--reason", "late", "--limit", "1")) == 1
        assert deployment.as_json("groups", "letters", "wor", "--letters", "jobs_dead") == []
        redriven = deployment.as_json("groups", "redrive", *of, "--into", "jobs", "--reason", "customer")
        assert redriven == {"redriven": 1}
        assert deployment.as_json("groups", "discard", *of, "--yes") == {"discarded": 2}
        assert deployment.as_json("groups", "letters", *of) == []
        deployment.fails("INVALID_ARGUMENT", "groups", "discard", "work", "--letters", "jobs", "--yes")
