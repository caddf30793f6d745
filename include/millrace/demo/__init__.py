"""The demo: a year of flights through the whole flow."""
