"""Real servers that tests and ``make run LOG=...`` start by themselves: processes over a data folder, and nothing else.
Kafka and Pulsar for logs, etcd and MariaDB for what a cluster agrees on.

``python -m millrace.brokers kafka --data <folder>`` runs one in the foreground. A deployment of yours runs its own
brokers (docs/brokers.md); these are small, of one node, and bound to this host.
"""
