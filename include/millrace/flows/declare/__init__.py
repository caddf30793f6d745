"""What a declaration is made of: parts, secrets, addresses, paths."""
