"""Numbers one by one: floating-point and integer formats.

A format is plain, immutable data: it knows its largest and smallest values and what each of its
codes means, and nothing about tensors. One description covers every format up to 23 mantissa bits
(IEEE-like, OCP, FNUZ, your own), so a format is a few integers here instead of hand-written code
per type.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, Literal, get_args

import torch

Specials = Literal["ieee", "fn", "fnuz", "finite"]
_FLOAT32_MAX = torch.finfo(torch.float32).max


def check_fields(format: object, whole: str, **other: tuple[type, ...]) -> None:
    """Whole numbers become plain ints (numpy's are welcome); any other type is refused by name."""
    for field in whole.split():
        value = getattr(format, field)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{field} is {value!r}; it must be an int")
        object.__setattr__(format, field, operator.index(value))
    for field, types in other.items():
        if not isinstance(value := getattr(format, field), types):
            raise TypeError(f"{field} is {value!r}; allowed: {[t.__name__ for t in types]}")


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: sign, exponent, mantissa.

    Args:
        exponent_bits: width of the exponent field, 1 to 8.
        mantissa_bits: width of the mantissa field (without the hidden bit), 0 to 23.
        bias: subtracted from the exponent field; ``None`` means the usual one:
            ``2**(exponent_bits - 1) - 1``, and one more for ``"fnuz"``.
        specials: what the codes at the edge of the range mean.

            - ``"ieee"``: the topmost exponent holds infinity (mantissa 0) and NaN, as in IEEE 754.
              Without mantissa bits there is an infinity and no NaN.
            - ``"fn"``: no infinity; the code of all ones is NaN (OCP OFP8 E4M3).
            - ``"fnuz"``: no infinity, no negative zero; the code of negative zero is NaN.
            - ``"finite"``: every code is a finite number (OCP MX element formats of 4 and 6 bits).
        subnormals: whether numbers below the smallest normal exist. Without them the neighbours of
            the smallest normal number are zero and its successor.
        signed: ``False`` only for scale formats such as ``e8m0`` (OCP MX): no sign, no zero.

    Raises:
        TypeError: a field is of the wrong type.
        ValueError: a field is out of range, or the format's values do not all fit into float32.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    specials: Specials = "ieee"
    subnormals: bool = True
    signed: bool = True

    def __post_init__(self) -> None:
        bias = "" if self.bias is None else "bias"
        whole = f"exponent_bits mantissa_bits {bias}"
        check_fields(self, whole, subnormals=(bool,), signed=(bool,))
        if not 1 <= self.exponent_bits <= 8:
            raise ValueError(f"exponent_bits is {self.exponent_bits}; allowed: 1 to 8")
        if not 0 <= self.mantissa_bits <= 23:
            raise ValueError(f"mantissa_bits is {self.mantissa_bits}; allowed: 0 to 23")
        if self.specials not in get_args(Specials):
            raise ValueError(f"specials is {self.specials!r}; allowed: {get_args(Specials)}")
        if self.bias is None:
            object.__setattr__(self, "bias", self.usual_bias)
        if abs(self._bias) > 400:
            raise ValueError(f"bias is {self.bias}; none beyond 400 keeps values inside of float32")
        if not self.signed and (self.mantissa_bits or self.specials != "fn" or self.subnormals):
            raise ValueError(
                "an unsigned format is a scale: it needs mantissa_bits=0, specials='fn', "
                "subnormals=False (as e8m0 has)"
            )
        if self._smallest_code > self.largest_code:
            raise ValueError(
                f"{self.name} has no finite number besides zero; give it more exponent or mantissa "
                "bits, or specials='finite'"
            )
        finest = self.min_exponent - self.mantissa_bits  # also without subnormals
        if self.largest > _FLOAT32_MAX or finest < -149:
            raise ValueError(
                f"{self.name} reaches from {self.smallest:.4g} to {self.largest:.4g} in steps of "
                f"2**{finest} and more, outside of float32 (steps of 2**-149, to "
                f"{_FLOAT32_MAX:.4g}); choose another bias"
            )

    @property
    def bits(self) -> int:
        """Width of one code in bits."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def largest_code(self) -> int:
        """Code (without sign) of the largest finite number."""
        all_ones: int = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        if self.specials == "ieee":
            return all_ones - int(2**self.mantissa_bits)
        return all_ones - (self.specials == "fn")

    @property
    def infinity_code(self) -> int | None:
        """Code (without sign) of infinity; ``None`` if the format has none."""
        return self.largest_code + 1 if self.has_infinity else None

    @property
    def nan_code(self) -> int | None:
        """Code of the quiet NaN, without sign (FNUZ: the sign bit itself); ``None`` if absent."""
        if self.specials == "ieee" and self.mantissa_bits:
            return self.largest_code + 1 + int(2 ** (self.mantissa_bits - 1))
        if self.specials == "fn":
            return self.largest_code + 1
        if self.specials == "fnuz":
            return int(2 ** (self.exponent_bits + self.mantissa_bits))
        return None

    @property
    def _smallest_code(self) -> int:
        if not self.signed:
            return 0
        return 1 if self.subnormals else 2**self.mantissa_bits

    def _magnitude(self, code: int) -> float:
        """Value of a finite code without sign."""
        field, mantissa = divmod(code, 2**self.mantissa_bits)
        if not self.signed:
            return math.ldexp(1.0, field - self._bias)
        if field == 0:
            hidden, exponent = 0, self.min_exponent
            mantissa = mantissa if self.subnormals else 0
        else:
            hidden, exponent = 2**self.mantissa_bits, field - self._bias
        return math.ldexp(hidden + mantissa, exponent - self.mantissa_bits)

    def value_of(self, code: int) -> float:
        """Value of one code of ``bits`` bits, sign included; exact in a Python float."""
        if not 0 <= code < 2**self.bits:
            raise ValueError(f"code is {code}; {self.name} has codes 0 to {2**self.bits - 1}")
        sign_bit = int(2 ** (self.exponent_bits + self.mantissa_bits))
        negative, magnitude = divmod(code, sign_bit) if self.signed else (0, code)
        if self.specials == "fnuz" and code == sign_bit:
            return math.nan
        if magnitude <= self.largest_code:
            value = self._magnitude(magnitude)
        else:
            value = math.inf if magnitude == self.infinity_code else math.nan
        return -value if negative else value

    def values(self) -> torch.Tensor:
        """Values of all codes, in the order of the codes: float32 of shape ``(2**bits,)``.

        Raises:
            ValueError: the format is wider than 16 bits.
        """
        return table_of(self).clone()

    @property
    def _bias(self) -> int:
        assert self.bias is not None
        return self.bias

    @property
    def usual_bias(self) -> int:
        """The bias of a format that is given none."""
        return int(2 ** (self.exponent_bits - 1)) - 1 + (self.specials == "fnuz")

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number (unsigned formats: of the smallest number)."""
        return 1 - self._bias if self.signed else -self._bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number: ``largest`` lies in [2**e, 2**(e+1))."""
        return math.frexp(self.largest)[1] - 1

    @cached_property
    def largest(self) -> float:
        """Largest finite number."""
        return self._magnitude(self.largest_code)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal number, ``2**min_exponent``."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float | None:
        """Smallest positive subnormal number; ``None`` if the format has none."""
        has = self.subnormals and self.mantissa_bits > 0
        return 2.0 ** (self.min_exponent - self.mantissa_bits) if has else None

    @property
    def smallest(self) -> float:
        """Smallest positive number of the format."""
        return self._magnitude(self._smallest_code)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number, ``2**-mantissa_bits``."""
        return 2.0**-self.mantissa_bits

    @property
    def has_infinity(self) -> bool:
        """Whether the format can hold infinity."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether the format can hold NaN."""
        return self.nan_code is not None

    @property
    def has_negative_zero(self) -> bool:
        """Whether negative zero differs from zero."""
        return self.signed and self.specials != "fnuz"

    @property
    def overflow_threshold(self) -> tuple[float, bool]:
        """Where rounding to nearest-even leaves the finite numbers.

        Returns:
            ``(midpoint, inclusive)``: magnitudes above ``midpoint`` overflow, and ``midpoint``
            itself does if ``inclusive`` (the tie goes to the even code).
        """
        spacing = 2.0 ** (max(self.max_exponent, self.min_exponent) - self.mantissa_bits)
        return self.largest + spacing / 2, self.largest_code % 2 == 1

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype with the same bits and meaning, if torch has one."""
        from narrowgauge.formats.names import torch_dtypes

        return torch_dtypes().get(self)

    @property
    def name(self) -> str:
        """The name that :func:`format_of` turns back into this format."""
        from narrowgauge.formats.names import name_of  # made of these classes itself

        return name_of(self)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class IntFormat:
    """Symmetric integers of ``bits`` bits, two's complement: −(2**(bits−1)−1) … 2**(bits−1)−1.

    The code of −2**(bits−1) is never produced; when decoded it has that value. Values beyond the
    range saturate. There is no infinity, no NaN and no negative zero.

    Args:
        bits: 2 to 16.

    Raises:
        ValueError: ``bits`` is out of range.
    """

    bits: int

    def __post_init__(self) -> None:
        check_fields(self, "bits")
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits is {self.bits}; an integer format has 2 to 16 bits")

    signed: ClassVar[bool] = True
    smallest: ClassVar[float] = 1.0
    epsilon: ClassVar[float] = 1.0
    has_infinity: ClassVar[bool] = False
    has_nan: ClassVar[bool] = False
    has_negative_zero: ClassVar[bool] = False
    torch_dtype: ClassVar[torch.dtype | None] = None  # torch's integers are not symmetric

    @property
    def largest(self) -> float:
        """Largest number."""
        return float(2 ** (self.bits - 1) - 1)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest number."""
        return self.bits - 2

    @property
    def overflow_threshold(self) -> tuple[float, bool]:
        """As :attr:`FloatFormat.overflow_threshold`; the tie above the odd largest overflows."""
        return self.largest + 0.5, True

    def value_of(self, code: int) -> float:
        """Value of one two's-complement code of ``bits`` bits."""
        if not 0 <= code < 2**self.bits:
            raise ValueError(f"code is {code}; {self.name} has codes 0 to {2**self.bits - 1}")
        return float(code - 2**self.bits if code >= 2 ** (self.bits - 1) else code)

    def values(self) -> torch.Tensor:
        """Values of all codes, in the order of the codes: float32 of shape ``(2**bits,)``."""
        return table_of(self).clone()

    @property
    def name(self) -> str:
        """The name that :func:`format_of` turns back into this format."""
        return f"int{self.bits}"

    def __str__(self) -> str:
        return self.name


@cache
def table_of(format: FloatFormat | IntFormat) -> torch.Tensor:
    """Its ``values()``, always the same tensor, which nobody may change."""
    if format.bits > 16:
        raise ValueError(f"{format.name} has 2**{format.bits} values; listed only up to 16 bits")
    values = [format.value_of(code) for code in range(2**format.bits)]
    return torch.tensor(values, dtype=torch.float32, device="cpu")
