"""Consume with a group: it continues after the last acknowledged unit, also after a crash. At least once."""

import millrace

with millrace.connect() as db:
    events = db.create_collection("events", {"id": "int64", "what": "string"}, key="id", exist_ok=True)
    last = events.upsert([{"id": number, "what": f"event {number}"} for number in range(5)]).last_tick
    with events.consume(group="mailer", until=last) as consumer:
        for delivery in consumer:
            for change in delivery.changes():
                print(change.kind, change.rows.num_rows, "rows")
            consumer.acknowledge(delivery)  # the group does not get it again
    with events.consume(group="mailer", until=last) as consumer:
        print("left for the next start:", sum(1 for _ in consumer))
