"""The read model: typed values that people and dashboards see of a running Millrace, at bounded cost.

Nothing here writes, starts a process, or imports Airflow or Spark. :class:`~millrace.observe.observer.Observer` is the
single entry point: it caches for a second or two, takes each answer from one version of a table, and pages long lists.
The other modules import deltalake and pyarrow, so a server loads them with the first request, not at start.
"""
