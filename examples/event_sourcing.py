"""Accounts as events, and a read model: a declared flow keeps each account's balance in a collection.

python examples/event_sourcing.py                               # opens accounts, pays, and shows their history
export PYTHONPATH=examples MILLRACE_FLOW_DECLARATIONS=event_sourcing
millrace flows run balances --until-end                         # folds the events into the collection balances
millrace flows batch balances --until TICK                      # the read model as of a tick of the events
python examples/event_sourcing.py                               # shows the read model
"""

from dataclasses import dataclass, replace

import millrace
from millrace.flows.declare.flow import Flow, Transform
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sources.collection.model import CollectionSource

EVENTS = millrace.EventTypes()


@EVENTS.register()
@dataclass
class Deposited:
    amount: int


@EVENTS.register()
@dataclass
class Withdrawn:
    amount: int


@dataclass(frozen=True)
class Account:
    balance: int = 0


def apply(state: Account, event: Deposited | Withdrawn) -> Account:
    change = event.amount if isinstance(event, Deposited) else -event.amount
    return replace(state, balance=state.balance + change)


ACCOUNTS = millrace.Aggregate(events=EVENTS, initial=Account, fold=apply)

FLOWS = [
    Flow(
        name="balances",
        description="The balance of each account: a read model of its events.",
        source=CollectionSource(collection="payments", columns=("aggregate", "version", "type", "data")),
        transform=Transform(
            sql="""select aggregate as account, max(version) as version, sum(
                    case type when 'Deposited' then 1 when 'Withdrawn' then -1 else 0 end
                    * coalesce(cast(get_json_object(data, '$.amount') as bigint), 0)) as balance
                from payments group by aggregate""",
            output_mode="update",
        ),
        sink=CollectionSink(collection="balances", mode="upsert", create=True, key="account"),
    )
]


def withdraw(amount: int):
    """Return a decision: to withdraw an amount, if it is there."""
    return lambda account: [Withdrawn(amount)] if account.balance >= amount else []


if __name__ == "__main__":
    with millrace.connect() as db:
        store = millrace.EventStore.open(db, "payments", ACCOUNTS)
        paid = store.append("A-17", Deposited(100))
        store.execute("A-17", withdraw(30))
        store.execute("B-2", withdraw(30))  # nothing is there: no event
        print("withdrawn:", store.load("A-17", at=paid.tick).state.balance - store.load("A-17").state.balance)
        for event in store.history("A-17")[:2]:
            print(f"{event.version}: {event.type} {event.data.amount}")
        try:
            store.append("A-17", Deposited(1), expected_version=1)
        except millrace.errors.VersionConflict as conflict:
            print("too late:", conflict.code)
        print("tick:", store.rebuild().tick)
        if "balances" in list(db):
            for row in db["balances"].read(order_by="account").to_pylist():
                print(f"{row['account']} has {row['balance']} at version {row['version']}")
