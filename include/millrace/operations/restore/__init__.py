"""Point-in-time restore: the rows of a collection at a time tick become a new collection, through messages (law 9)."""
