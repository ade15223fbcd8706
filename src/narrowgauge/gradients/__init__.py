"""Backward results between replicas, in narrow formats."""

from narrowgauge.gradients.hooks import GradientCompression as GradientCompression
from narrowgauge.gradients.hooks import compress as compress
from narrowgauge.gradients.policy import parameter_formats as parameter_formats
