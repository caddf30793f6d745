"""Broadcasts: one message to many VChannels, stored before its first append and completed by any coordinator."""
