"""Backward results between replicas, in narrow formats."""

from narrowgauge.gradients.emulation import EmulatedNodes as EmulatedNodes
from narrowgauge.gradients.emulation import emulate_all_reduce as emulate_all_reduce
from narrowgauge.gradients.hooks import GradientCompression as GradientCompression
from narrowgauge.gradients.hooks import compress as compress
from narrowgauge.gradients.policy import Hybrid as Hybrid
from narrowgauge.gradients.policy import Schedule as Schedule
from narrowgauge.gradients.policy import parameter_formats as parameter_formats
from narrowgauge.gradients.sharded import (
    ShardedGradientCompression as ShardedGradientCompression,
)
from narrowgauge.gradients.sharded import compress_sharded as compress_sharded
