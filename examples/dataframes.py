"""Write and read DataFrames of pandas, Polars and pyarrow. The first one gives the schema."""

import pandas as pd
import polars as pl
import pyarrow as pa

import millrace

weather = pd.DataFrame({"station": ["JFK", "LGA"], "celsius": [3.5, 4.0]})

with millrace.connect() as db:
    table = db.create_collection("weather", weather, key="station", exist_ok=True)
    table.upsert(weather)
    table.upsert(pl.DataFrame({"station": ["EWR"], "celsius": [2.5]}))
    table.upsert(pa.table({"station": ["BOS"], "celsius": [-1.0]}))
    print(table.to_polars().sort("station"))
    print("mean of the warm ones:", table.to_pandas().query("celsius > 0").celsius.mean())
