"""Kafka's clusters as both sides reach them."""
