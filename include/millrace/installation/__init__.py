"""The whole system on one machine:

Airflow, the log, the streaming jobs; started, found and stopped as one (`system.py`).
"""
