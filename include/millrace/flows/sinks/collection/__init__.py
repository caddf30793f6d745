"""Documents as rows of a collection of this deployment: upserts by its primary key; a tombstone deletes."""
