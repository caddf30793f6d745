"""Collections, and the protocol through which their DDL is broadcast. The coordinator implements it."""
