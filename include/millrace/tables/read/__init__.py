"""A collection at a time tick: planned once (`plan.py`), read as Arrow without a JVM (`arrow.py`) or as a Spark DataFrame (`spark.py`)."""
