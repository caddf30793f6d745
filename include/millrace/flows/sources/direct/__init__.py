"""Messages of UDP and ZeroMQ, as they arrive, at most once (docs/direct-messaging.md)."""
