"""The operation `move`: the tables of a deployment go to another place, while it runs."""
