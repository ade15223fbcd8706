"""Parameters, from the rank that updates them to all others: as compressed differences."""

from narrowgauge.parameters.optimizer import ShardedOptimizer as ShardedOptimizer
