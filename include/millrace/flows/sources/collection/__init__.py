"""A collection's rows as a source."""
