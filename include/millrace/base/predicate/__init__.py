"""One language of predicates for deletes, reads and filters of files."""
