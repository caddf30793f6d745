"""Units out, in time-tick order a VChannel, with positions that a group keeps; and a collection's changes as a stream."""
