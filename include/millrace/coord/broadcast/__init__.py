"""Broadcasts: one message to many VChannels, kept before its first append and completed whoever leads."""
