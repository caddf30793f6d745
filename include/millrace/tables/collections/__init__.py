"""What the flusher makes of the WAL: a collection's rows and deletes, segments, checkpoints, bases; and changes as Arrow batches."""
