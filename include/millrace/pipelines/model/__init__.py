"""What a pipeline is: its declaration as pydantic models, what is wrong with one by field, and the file of defaults. No Spark, no Kafka."""
