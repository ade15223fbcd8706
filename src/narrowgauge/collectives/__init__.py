"""Numbers between ranks, in narrow formats."""

from narrowgauge.collectives.reduce import all_reduce as all_reduce
from narrowgauge.collectives.transport import CollectiveError as CollectiveError
