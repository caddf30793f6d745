"""A pipeline's steps, compiled once and run on records: a document or a reason for each. No Kafka, sink or clock."""
