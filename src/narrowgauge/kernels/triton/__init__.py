"""The kernels for GPUs, in Triton: bit for bit those of the CPU.

Only imported when the first tensor on a GPU arrives, so that narrowgauge works without Triton.
"""

from narrowgauge.kernels.triton.launch import Triton as Triton
