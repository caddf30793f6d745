"""Tables of databases that are read by SQL: connections, values in the capture's JSON, and a feeder of its spool."""
