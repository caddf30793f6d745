"""Kafka as the log: a PChannel is a topic of one partition, or a partition of one topic. confluent-kafka carries entries, kafka-python administers."""
