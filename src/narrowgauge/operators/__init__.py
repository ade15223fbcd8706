"""Operands, results and saved activations, in a format chosen for each operator of the model."""

from narrowgauge.operators.applying import detach as detach
from narrowgauge.operators.mode import OperatorMismatch as OperatorMismatch
from narrowgauge.operators.plan import OperatorPlan as OperatorPlan
from narrowgauge.operators.recording import Edge as Edge
from narrowgauge.operators.recording import Operand as Operand
from narrowgauge.operators.recording import OperatorCall as OperatorCall
from narrowgauge.operators.recording import Recording as Recording
from narrowgauge.operators.recording import record_operators as record_operators
from narrowgauge.operators.search import OperatorSearch as OperatorSearch
