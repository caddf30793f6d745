"""Files that appear in a folder, each read once (docs/files.md)."""
