"""A precision plan found while the model trains: the loop's side of it is in ``loop.py``."""

from narrowgauge.operators.search.loop import OperatorSearch as OperatorSearch
