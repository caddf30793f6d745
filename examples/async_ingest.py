"""Send many small appends from asyncio. Calls share messages, and no call takes a thread."""

import asyncio

import millrace


async def main() -> None:
    with millrace.connect() as db:
        db.create_collection("clicks", {"id": "int64", "page": "string"}, key="id", exist_ok=True)
        async with millrace.AsyncProducer(db.producer) as producer:
            done = await asyncio.gather(
                *(producer.insert("clicks", [{"id": number, "page": "/"}]) for number in range(200))
            )
    print("rows:", sum(each.rows for each in done))


asyncio.run(main())
