"""Collections, and the port through which their DDL is broadcast. Who implements it is the coordinator's matter."""
