"""The flusher's output: a collection's rows and deletes, segments, checkpoints, bases; and changes as Arrow batches."""
