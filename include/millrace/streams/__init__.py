"""Stream processing: a collection's rows as a source of Spark's, sinks with a chosen guarantee, streams that are declared and run."""
