"""Sources: where rows and documents come from, one folder for each kind."""
