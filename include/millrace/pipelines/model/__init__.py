"""A pipeline's declaration as pydantic models, its problems by field, and the file of defaults. No Spark, no Kafka."""
