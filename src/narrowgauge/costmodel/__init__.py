"""What a training step costs over a network, before one is rented: see :func:`predict`."""

from narrowgauge.costmodel.prediction import Prediction as Prediction
from narrowgauge.costmodel.prediction import bits_per_second as bits_per_second
from narrowgauge.costmodel.prediction import predict as predict
from narrowgauge.costmodel.timeline import StepCost as StepCost
