"""Assignment records: one for each role of each PChannel, its states and transitions."""
