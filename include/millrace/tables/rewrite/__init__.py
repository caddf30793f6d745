"""Replacing files of a table by others with the same rows: which files, the rewriting, the commit; and folds of
small files.
"""
