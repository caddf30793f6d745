"""Stream processing: the rows source, windows, keyed operators and sinks, each beside what one would take instead."""
