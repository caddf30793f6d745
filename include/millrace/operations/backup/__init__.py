"""Backup of a whole running deployment, its verification, and the restore into an empty data folder."""
