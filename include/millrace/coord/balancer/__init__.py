"""The balancer: gives every role of every PChannel one owner, and moves roles rarely and with a reason."""
