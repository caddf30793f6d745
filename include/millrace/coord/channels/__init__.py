"""PChannels as the cluster knows them: a record for each role, its states, what changes them."""
