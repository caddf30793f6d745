"""The coordinator: terms of PChannels, collections, DDL as persisted, idempotent broadcasts; the only place that decides who owns what."""
