"""Names of formats: which name means which format, and back.

A few formats have names that the field knows; any other is spelt from its parts, so that every
format can be written in a command line, a file or an error message, and is found again by its name.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import TypeAlias, get_args

import torch

from narrowgauge.formats.block import BlockFormat, ScaleRule
from narrowgauge.formats.scalar import FloatFormat, IntFormat

Format: TypeAlias = FloatFormat | IntFormat | BlockFormat
FormatLike: TypeAlias = Format | str | torch.dtype


@cache
def known_formats() -> dict[str, Format]:
    """The formats with a name of their own, by name; any other is spelt ``eXmY…`` or ``intN``."""
    e5m2, e4m3fn = FloatFormat(5, 2), FloatFormat(4, 3, specials="fn")
    small = [FloatFormat(e, m, specials="finite") for e, m in ((2, 3), (3, 2), (2, 1))]
    e8m0 = FloatFormat(8, 0, None, "fn", False, False)
    e2m3fn, e3m2fn, e2m1fn = small  # ml_dtypes and OCP call them "fn"; they have no NaN either
    return {
        "fp32": FloatFormat(8, 23), "tf32": FloatFormat(8, 10), "bf16": FloatFormat(8, 7),
        "fp16": FloatFormat(5, 10), "e5m2": e5m2, "e4m3": FloatFormat(4, 3), "e4m3fn": e4m3fn,
        "e5m2fnuz": FloatFormat(5, 2, specials="fnuz"),
        "e4m3fnuz": FloatFormat(4, 3, specials="fnuz"),
        "e3m4": FloatFormat(3, 4), "e3m0": FloatFormat(3, 0),
        "e2m3fn": e2m3fn, "e3m2fn": e3m2fn, "e2m1fn": e2m1fn,
        "e8m0": e8m0,
        "int8": IntFormat(8), "int4": IntFormat(4),
        "mxfp8_e5m2": BlockFormat(e5m2, 32, e8m0, "floor"),
        "mxfp8_e4m3": BlockFormat(e4m3fn, 32, e8m0, "floor"),
        "mxfp6_e3m2": BlockFormat(e3m2fn, 32, e8m0, "floor"),
        "mxfp6_e2m3": BlockFormat(e2m3fn, 32, e8m0, "floor"),
        "mxfp4_e2m1": BlockFormat(e2m1fn, 32, e8m0, "floor"),
        "nvfp4": BlockFormat(e2m1fn, 16, e4m3fn, "two-level"),
    }  # fmt: skip


_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "mxfp4": "mxfp4_e2m1"}
# Digits are few and ASCII: int() takes any others too, up to a limit of its own.
_SPELT = re.compile(
    r"(u?)e([0-9]{1,9})m([0-9]{1,9})(?:b(-?[0-9]{1,9}))?(fnuz|finite|fn|ieee|nan)?(ftz)?"
)


@cache
def _known_names() -> dict[Format, str]:
    return {format: name for name, format in known_formats().items()}


def name_of(format: Format) -> str:
    """The name that :func:`format_of` turns back into this format."""
    if (known := _known_names().get(format)) is not None:
        return known
    if isinstance(format, IntFormat):
        return f"int{format.bits}"
    if isinstance(format, BlockFormat):
        scale = "" if format.scale.name == "e8m0" else f":{format.scale.name}"
        usual = format.scale_rule == _usual_rule(format.scale)
        rule = "" if usual else f":{format.scale_rule}"
        return f"{format.element.name}@{format.block_size}{scale}{rule}"
    start = f"{'' if format.signed else 'u'}e{format.exponent_bits}m{format.mantissa_bits}"
    start += "" if format.bias == format.usual_bias else f"b{format.bias}"
    end = "" if format.subnormals or not format.signed else "ftz"
    middle: str = "" if format.specials == "ieee" or not format.signed else format.specials
    if start + middle + end in known_formats():  # e8m0 and e2m1fn are other formats
        middle = {"ieee": "ieee", "fn": "nan"}[format.specials]
    return start + middle + end


@cache
def torch_dtypes() -> dict[Format, torch.dtype]:
    """The torch dtypes that have the bits and the meaning of a format, by format."""
    names = {
        "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "e5m2": "float8_e5m2",
        "e4m3fn": "float8_e4m3fn", "e5m2fnuz": "float8_e5m2fnuz", "e4m3fnuz": "float8_e4m3fnuz",
        "e8m0": "float8_e8m0fnu",  # since torch 2.7
    }  # fmt: skip
    there = {ours: getattr(torch, theirs, None) for ours, theirs in names.items()}
    return {known_formats()[name]: dtype for name, dtype in there.items() if dtype is not None}


def _usual_rule(scale: FloatFormat) -> ScaleRule:
    """The rule that a block format's name leaves out."""
    return "amax" if scale.signed else "fit"


def _unknown(name: str) -> ValueError:
    names = list(known_formats())
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ValueError(
        f"format {name!r} is unknown; {hint}known: {', '.join(names)}; or any eXmY with X ≤ 8, "
        "Y ≤ 23 (suffix fn, fnuz, finite), intN with N ≤ 16, or element@block such as int4@64."
    )


@cache
def _parse(name: str) -> Format:
    text = name.strip().lower()
    text = _ALIASES.get(text, text)
    if (known := known_formats().get(text)) is not None:
        return known
    if "@" in text:
        element_text, _, rest = text.partition("@")
        size, *how = rest.split(":")
        rule = how.pop() if how and how[-1] in get_args(ScaleRule) else None
        if "@" in rest or len(how) > 1 or not re.fullmatch("[0-9]{1,18}", size):
            raise _unknown(name)
        element, scale = _parse(element_text), _parse(how[0] if how else "e8m0")
        if isinstance(element, BlockFormat) or not isinstance(scale, FloatFormat):
            raise _unknown(name)
        return BlockFormat(element, int(size), scale, rule or _usual_rule(scale))  # type: ignore[arg-type]
    if re.fullmatch("int[0-9]{1,9}", text):
        return IntFormat(int(text[3:]))
    match = _SPELT.fullmatch(text)
    if match is None or (match[1] and match[5] in ("fnuz", "finite", "ieee")):
        raise _unknown(name)
    unsigned, exponent, mantissa, bias, specials, flush = match.groups()
    return FloatFormat(
        int(exponent),
        int(mantissa),
        None if bias is None else int(bias),
        "fn" if unsigned or specials == "nan" else (specials or "ieee"),  # type: ignore[arg-type]
        subnormals=not (flush or unsigned),
        signed=not unsigned,
    )


def format_of(format: FormatLike) -> Format:
    """The format meant by a name, a torch dtype, or a format itself.

    Args:
        format: ``"e4m3"``, ``"bf16"``, ``"mxfp8_e4m3"``, any ``eXmY`` with an optional bias
            (``b11``) and suffix (``fn``, ``fnuz``, ``finite``, ``ftz`` for no subnormals);
            ``"int4@64"``, element and block size, then if they are not the usual ones
            (``e8m0``, ``fit``; with a signed scale ``amax``) ``:scale`` and ``:rule``, as in
            ``"e2m1fn@16:e4m3fn"``, ``"e4m3fn@64:floor"``; ``torch.bfloat16``; or a format object.

    Raises:
        ValueError: the name is unknown (a near name is suggested), or torch's dtype has no format.
        TypeError: something else was given.
    """
    if isinstance(format, FloatFormat | IntFormat | BlockFormat):
        return format
    if isinstance(format, str):
        return _parse(format)
    if isinstance(format, torch.dtype):
        for known, dtype in torch_dtypes().items():
            if dtype == format:
                return known
        allowed = ", ".join(map(str, torch_dtypes().values()))
        raise ValueError(f"{format} is not a format; allowed dtypes: {allowed}")
    raise TypeError(
        "a format is a name, a torch.dtype, a FloatFormat, IntFormat or BlockFormat; got "
        f"{type(format).__name__}"
    )
