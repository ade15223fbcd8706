"""The only place with machine code: kernels, and the operators that choose among them by device.

``operators`` are what the library calls; the functions here are for hot paths with own buffers.
"""

from narrowgauge.kernels.backends import available_backends as available_backends
from narrowgauge.kernels.backends import backend as backend
from narrowgauge.kernels.backends import select as select
from narrowgauge.kernels.native import MISSING as MISSING
from narrowgauge.kernels.raw import UnrepresentableNaN as UnrepresentableNaN
from narrowgauge.kernels.raw import decode_into as decode_into
from narrowgauge.kernels.raw import encode_fitting_into as encode_fitting_into
from narrowgauge.kernels.raw import encode_into as encode_into
from narrowgauge.kernels.raw import largest_magnitudes as largest_magnitudes
from narrowgauge.kernels.raw import reduce_encode_into as reduce_encode_into
from narrowgauge.kernels.raw import reduce_into as reduce_into
from narrowgauge.kernels.reference import odd_sum as odd_sum
