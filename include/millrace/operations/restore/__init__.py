"""Point-in-time restore: a collection's rows at a time tick become a new collection, through messages (law 10)."""
