"""Declared streams at work: their frames and sinks under Spark, their jobs, what they tell of themselves."""
