"""The whole system on one machine: Airflow, the log and the streaming jobs, started, found and stopped as one.

Start with `system.py`.
"""
