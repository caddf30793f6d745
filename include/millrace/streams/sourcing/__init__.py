"""Event sourcing: aggregates whose state is a fold over their events in a collection. docs/event-sourcing.md."""
