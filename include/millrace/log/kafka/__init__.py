"""Kafka as the log: a PChannel is a topic with one partition, or a partition of one topic.

confluent-kafka transfers entries; kafka-python administers topics.
"""
