"""Layers whose operands, products and sums are rounded as narrow hardware would round them."""

from narrowgauge.nn.attention import MultiheadAttention as MultiheadAttention
from narrowgauge.nn.convert import convert as convert
from narrowgauge.nn.convert import deconvert as deconvert
from narrowgauge.nn.layer_formats import LayerFormats as LayerFormats
from narrowgauge.nn.layers import Conv1d as Conv1d
from narrowgauge.nn.layers import Conv2d as Conv2d
from narrowgauge.nn.layers import Conv3d as Conv3d
from narrowgauge.nn.layers import Linear as Linear
from narrowgauge.nn.layers import Quantizer as Quantizer
