"""A collection as a sink: rows appended, upserted, or changes applied as another collection's stream has them."""
