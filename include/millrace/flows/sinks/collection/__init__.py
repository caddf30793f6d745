"""A collection as a sink: rows appended, upserted, or changes applied; documents upserted by its primary key."""
