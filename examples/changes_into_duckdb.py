"""Copy each change exactly once into another database, with the stream's positions in the same transaction."""

import json

import duckdb

import millrace

LAST = """
create or replace temp table last as
select id, name, _change from (select *, row_number() over () as place from changed)
qualify row_number() over (partition by id order by place desc) = 1
"""  # of several changes of a key in one batch, the last counts

target = duckdb.connect()
target.execute("create table rows (id bigint primary key, name varchar); create table place (positions json)")

with millrace.connect() as db:
    people = db.create_collection("people", {"id": "int64", "name": "string"}, key="id", exist_ok=True)
    people.upsert([{"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}])
    last = people.delete([1]).last_tick

    kept = target.execute("select positions from place").fetchone()
    with people.changes(after=json.loads(kept[0]) if kept else None, until=last) as stream:
        for batch in stream:
            changed = batch.rows
            target.begin()
            target.execute(LAST)
            target.execute("delete from rows where id in (select id from last)")
            target.execute("insert into rows select id, name from last where _change = 'insert'")
            target.execute("delete from place; insert into place values (?)", [json.dumps(stream.positions)])
            target.commit()
print(target.execute("select * from rows order by id").fetchall())
