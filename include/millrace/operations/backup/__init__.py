"""Backup of a whole deployment while it runs, its verification, and the restore into an empty data folder."""
