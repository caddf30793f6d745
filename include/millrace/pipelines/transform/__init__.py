"""A pipeline's steps, compiled once and run over records: a document or a reason for each. No Kafka, no sink, no clock."""
