"""The benchmark: ratios to baselines measured in the same run (docs/performance.md)."""
