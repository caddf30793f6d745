"""Whether everything is there, once, and the same everywhere: log, WAL and collections held against each other."""
