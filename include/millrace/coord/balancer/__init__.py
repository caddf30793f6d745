"""The balancer: gives every role of every PChannel one owner, and moves few of them, seldom, for a reason."""
