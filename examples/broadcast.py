"""Change rows of two collections so that both changes happen, or none, whatever is killed in between."""

import millrace

with millrace.connect() as db:
    orders = db.create_collection("orders", {"id": "int64", "state": "string"}, key="id", exist_ok=True)
    carts = db.create_collection("carts", {"user": "string", "items": "int64"}, key="user", exist_ok=True)
    carts.upsert([{"user": "ada", "items": 3}])
    for _ in range(2):  # the second one is the same request: it has no further effect
        with db.broadcast(request="order-7") as messages:
            messages.upsert("orders", {"id": [7], "state": ["paid"]})
            messages.delete("carts", ["ada"])
        print("VChannels:", len(messages.result.ticks))
    print("orders:", orders.read().to_pylist())
    print("carts:", carts.read().to_pylist())
