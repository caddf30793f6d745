"""The parts of a declaration, with secrets, addresses and paths."""
