"""What the public face is made of: `produce/`, `consume/`, `spool/`. Knows no host and no coordinator, a server only by `rpc`."""
