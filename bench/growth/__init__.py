"""What each call costs as the deployment grows: ``make bench ARGS="--only growth"``, or ``python -m bench.growth``."""
