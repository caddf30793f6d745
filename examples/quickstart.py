"""Create a collection, write, change and delete rows, and read it as it is and as it was. Runs any number of times."""

import millrace

with millrace.connect() as db:
    users = db.create_collection("users", {"id": "int64", "name": "string?"}, key="id", exist_ok=True)
    users.upsert([{"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}, {"id": 3, "name": "Cyd"}])
    before = users.delete([2]).last_tick
    with users.transaction() as txn:  # all of it becomes visible at once, or never
        txn.delete([1, 4])
        txn.insert([{"id": 4, "name": "Dan"}])
    print("now:", sorted(users.read()["name"].to_pylist()))
    print("before the transaction:", sorted(users.read(at=before)["name"].to_pylist()))
