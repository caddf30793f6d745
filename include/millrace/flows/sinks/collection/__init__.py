"""A collection as a sink: rows are appended or upserted, or changes applied; documents are upserted by primary key."""
