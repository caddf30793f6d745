"""Hand out rows as tasks: each to one consumer, again if it fails, and aside as a dead letter if it always does."""

import millrace

with millrace.connect() as db:
    jobs = db.create_collection("jobs", {"id": "int64", "body": "string"}, key="id", exist_ok=True)
    jobs.upsert([{"id": 1, "body": "resize"}, {"id": 2, "body": "send"}, {"id": 3, "body": "?"}])
    done = 0
    with jobs.queue(group="workers", lease=60, dead_letters="jobs_dead", max_deliveries=2) as queue:
        while (task := queue.poll(timeout=2)) is not None:
            if task.row["body"] == "?":
                queue.release(task)  # nobody can do it: it becomes a dead letter
                continue
            print(f"{task.row['id']}: {task.row['body']}")
            queue.acknowledge(task)
            done += 1
        queue.commit()
    print("done:", done)
    print("dead letters:", [letter["row"] for letter in db["jobs_dead"].read().to_pylist()])
    print("discarded:", db.discard_tasks("jobs_dead", group="workers"))
