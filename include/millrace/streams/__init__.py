"""Stream processing: a collection's rows as a Spark source, sinks with a chosen guarantee, declared streams."""
