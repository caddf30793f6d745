"""Rows in a message: `rows` makes and reads payloads, `join` reads many at once, `layout` checks what stands where."""
