"""Inputs: batches, from where they are read to the ranks that train on them.

Its parts: ``source`` (what is read, in which order, from where on), ``split`` and ``structure``
(which rows of a nested batch belong to which rank), ``wire`` (from rank 0 to the others),
``consent`` (all ranks go on together, or none), ``slots`` and ``staging`` (buffers and the device),
``budget`` (bounded memory), ``pipeline`` (the threads), ``stalls`` (who waited for what), and
``feed``, which joins them.
"""

from narrowgauge.inputs.consent import FeedError as FeedError
from narrowgauge.inputs.feed import Feed as Feed
from narrowgauge.inputs.iteration import BatchInfo as BatchInfo
from narrowgauge.inputs.stalls import StallReport as StallReport
from narrowgauge.inputs.structure import BatchError as BatchError
