"""`millrace groups`: members and lag, a reset while nobody reads, and a drop."""

from __future__ import annotations

import pyarrow as pa

from millrace.client.consume.delivery import CHANGES
from millrace.client.database import Database, connect
from millrace.node.ingest.definition import ingest_to_end
from tests.cli.deployment import Deployment


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
