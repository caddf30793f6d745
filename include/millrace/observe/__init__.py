"""The read model: what people and dashboards see of a running Millrace, as typed values with bounded costs.

Nothing here writes, starts a process, or imports Airflow or Spark. :class:`~millrace.observe.observer.Observer` is the one
way in: it caches for a second or two, pins each answer to one version of a table, and pages what can be long. The modules
below it import deltalake and pyarrow, so a server loads them on its first question, not when it starts.
"""
