"""``narrowgauge search``: the search for an operator plan in a training that a file describes."""

from narrowgauge.search.loop import SearchStoppedError as SearchStoppedError
from narrowgauge.search.loop import run as run
from narrowgauge.search.report import write_report as write_report
from narrowgauge.search.script import ScriptError as ScriptError
from narrowgauge.search.script import Training as Training
from narrowgauge.search.script import load as load
