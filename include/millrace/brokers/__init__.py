"""Real servers that tests and ``make run LOG=...`` start: plain processes, each over one data folder.

Kafka and Pulsar serve as logs, etcd and MariaDB as meta stores of a cluster, OpenSearch as a sink of pipelines,
PostgreSQL as a database that flows capture.
``python -m millrace.brokers kafka --data <folder>`` runs one in the foreground. A production deployment brings its own
brokers (docs/brokers.md); these are single nodes, small, and bound to this host.
"""
