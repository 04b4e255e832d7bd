"""Eviction methods of others under the same budgets, on the same text, in the same blocks as `benchmarks.memory`."""
