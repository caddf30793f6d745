"""The demo: a year of flights from producers through the WAL into tables."""
