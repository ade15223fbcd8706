"""The demo: one small network on real data, trained with its gradients in several formats."""

from narrowgauge.demo.data import HOW_TO_GET_FASHION_MNIST as HOW_TO_GET_FASHION_MNIST
from narrowgauge.demo.data import DataError as DataError
from narrowgauge.demo.data import find_fashion_mnist as find_fashion_mnist
from narrowgauge.demo.launch import RanksFailedError as RanksFailedError
from narrowgauge.demo.launch import StoppedBySignalError as StoppedBySignalError
from narrowgauge.demo.launch import run as run
from narrowgauge.demo.settings import Settings as Settings
