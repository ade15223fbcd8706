"""Narrowgauge: every number that training moves, in the narrowest format that still converges."""

from narrowgauge import gradients as gradients
from narrowgauge import inputs as inputs
from narrowgauge import nn as nn
from narrowgauge import operators as operators
from narrowgauge import parameters as parameters
from narrowgauge.codec import decode as decode
from narrowgauge.codec import encode as encode
from narrowgauge.collectives import all_reduce as all_reduce
from narrowgauge.costmodel import predict as predict
from narrowgauge.formats import BlockFormat as BlockFormat
from narrowgauge.formats import FloatFormat as FloatFormat
from narrowgauge.formats import IntFormat as IntFormat
from narrowgauge.formats import format_of as format_of
from narrowgauge.inputs import Feed as Feed
from narrowgauge.ledger import Ledger as Ledger
from narrowgauge.matmul import MatmulBackward as MatmulBackward
from narrowgauge.matmul import matmul as matmul
from narrowgauge.operators import OperatorPlan as OperatorPlan
from narrowgauge.operators import OperatorSearch as OperatorSearch
from narrowgauge.parameters import ShardedOptimizer as ShardedOptimizer
from narrowgauge.rounding import quantize as quantize
from narrowgauge.rounding import quantize_ as quantize_
