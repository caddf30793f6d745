"""Millrace in Airflow: operators, sensors, triggers, forms, assets and macros for its own DAGs and for users' DAGs.

Nothing here imports Spark, Delta or a data frame library at module level, so that DAG files parse quickly
(docs/airflow.md).
"""
