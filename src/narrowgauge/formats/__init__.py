"""What a number is: floating-point, integer and block formats, and their names.

Everything that rounds, packs or scales asks a format; a format knows nothing of tensors.
"""

from narrowgauge.formats.block import BlockFormat as BlockFormat
from narrowgauge.formats.block import ScaleRule as ScaleRule
from narrowgauge.formats.names import Format as Format
from narrowgauge.formats.names import FormatLike as FormatLike
from narrowgauge.formats.names import format_of as format_of
from narrowgauge.formats.names import known_formats as known_formats
from narrowgauge.formats.scalar import FloatFormat as FloatFormat
from narrowgauge.formats.scalar import IntFormat as IntFormat
from narrowgauge.formats.scalar import Specials as Specials
from narrowgauge.formats.scalar import table_of as table_of
