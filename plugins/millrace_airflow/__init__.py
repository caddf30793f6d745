"""Millrace in Airflow: operators, sensors, triggers, forms, assets and macros for its own DAGs and for those of users.

Nothing here imports Spark, Delta or a data frame library at module level: a DAG file that uses it stays quick to parse
(docs/airflow.md).
"""
