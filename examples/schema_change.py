"""Add a column while the collection is in use. Older rows have null in it; a read of the past has the older schema."""

import millrace

with millrace.connect() as db:
    if "parcels" in db:
        db.drop_collection("parcels")
    parcels = db.create_collection("parcels", {"id": "int64", "city": "string"}, key="id", partitions=["eu", "us"])
    old = parcels.insert([{"id": 1, "city": "Oslo"}], partition="eu").last_tick
    parcels.add_field("weight", "float64?")
    parcels.insert([{"id": 2, "city": "Reno", "weight": 2.5}], partition="us")
    print("now:", parcels.read().sort_by("id").to_pylist())
    print("then:", parcels.read(at=old).column_names)
