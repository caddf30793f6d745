"""DDL of collections: its kinds, the sending of a message, its effects on the catalog, the placement of VChannels."""
