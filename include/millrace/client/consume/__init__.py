"""Consumers of units in the tick order of each VChannel, with group positions; and change streams."""
