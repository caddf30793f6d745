"""A pipeline's steps, compiled once and run on records. Each yields a document or a reason. No Kafka, sink or clock."""
