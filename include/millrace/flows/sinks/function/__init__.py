"""A function of the user as a sink: it gets each micro-batch as a DataFrame, with its number."""
