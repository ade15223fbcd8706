"""torch's layers, with the formats of their operands, products and sums as one more argument.

They are subclasses without state of their own: parameters, names and checkpoints are torch's, and
the parameters, the masters, stay in their dtype. They are rounded whenever they are used, which
costs a pass over the weights in each forward and keeps small updates from being lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import codec
from narrowgauge.formats import FormatLike, format_of
from narrowgauge.kernels.grid import check_rounding
from narrowgauge.nn import products
from narrowgauge.nn.layer_formats import LayerFormats
from narrowgauge.rounding import quantize


class Quantizer(nn.Module):
    """Rounds activations forward and gradients backward.

    Args:
        forward: the format of activations; ``None``: they pass unchanged.
        backward: the format of gradients; ``None``: they pass unchanged. (Not through the rounding
            of activations, which is ignored backward.)
        rounding: of both, as in :func:`narrowgauge.quantize`.

    Raises:
        ValueError: an unknown format or rounding.
    """

    def __init__(
        self,
        forward: FormatLike | None = None,
        backward: FormatLike | None = None,
        rounding: str = "nearest-even",
    ) -> None:
        super().__init__()
        check_rounding(rounding)
        self.forward_format = None if forward is None else format_of(forward).name
        self.backward_format = None if backward is None else format_of(backward).name
        self.rounding = rounding

    def forward(self, x: Tensor) -> Tensor:
        """``x`` rounded, of any shape and floating-point dtype."""
        if self.forward_format is not None:
            x = quantize(x, self.forward_format, rounding=self.rounding)
        if self.backward_format is not None:
            x = products.round_gradient(x, self.backward_format, self.rounding)
        return x

    def extra_repr(self) -> str:
        """Its formats, for ``print``."""
        return f"{self.forward_format}, {self.backward_format}, rounding={self.rounding!r}"


def _stay_visible(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook of every layer that rounds.

    In eval mode torch.nn.TransformerEncoderLayer reads its layers' weights and calls one fused
    kernel instead of the layers, which would silently undo them, unless a module in it has a hook.
    And TransformerEncoder passes nested tensors, which only that kernel understands.
    """
    if any(isinstance(x, Tensor) and x.is_nested for x in args):
        raise TypeError(
            "the input is a nested tensor; it must be a dense one. If torch.nn.TransformerEncoder "
            "made it, convert the whole encoder (again, if it was in another dtype then), or build "
            "it with enable_nested_tensor=False"
        )


class RoundedLayer(nn.Module):
    """What the layers here have in common: ``formats``, which may be changed at any time."""

    @property
    def formats(self) -> LayerFormats:
        """The formats it computes in."""
        formats: LayerFormats = self.__dict__["_formats"]
        return formats

    @formats.setter
    def formats(self, formats: LayerFormats | None) -> None:
        """Change them; ``None``: nothing is rounded."""
        formats = LayerFormats() if formats is None else formats
        if not isinstance(formats, LayerFormats):
            raise TypeError(
                f"formats is {type(formats).__name__}; it must be a narrowgauge.nn.LayerFormats, "
                "such as LayerFormats(weights='e4m3', activations='e4m3')"
            )
        self.__dict__["_formats"] = formats
        self._update_hook()

    @property
    def rounds(self) -> bool:
        """Whether anything differs from torch's own layer, in the dtype the parameters have."""
        return self.formats.rounds or any(
            self.formats.rounds_in(x.dtype) for x in self.parameters()
        )

    def forget_formats(self) -> None:
        """Leave nothing behind of what setting ``formats`` added."""
        self.formats = LayerFormats()
        del self.__dict__["_formats"]

    def _update_hook(self) -> None:
        hooks = self._forward_pre_hooks
        ours = [key for key, hook in hooks.items() if hook is _stay_visible]
        if self.rounds and not ours:
            self.register_forward_pre_hook(_stay_visible)
        elif not self.rounds:
            for key in ours:
                del hooks[key]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RoundedLayer:
        """What ``double()`` and the like call: fp32 rounds float64, though not float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._update_hook()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """What ``load_state_dict(assign=True)`` calls, which may bring another dtype too."""
        super()._load_from_state_dict(*args)
        self._update_hook()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy hooks of its own: ``copy.copy`` lets it share the dictionary."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forward_pre_hooks = self._forward_pre_hooks.copy()

    def extra_repr(self) -> str:
        """That of torch's layer, and the formats."""
        inherited = super().extra_repr()
        return f"{inherited}{', ' if inherited else ''}formats={self.formats}"


def as_input(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """``x`` for weights of this dtype: what autocast would convert comes in theirs.

    Raises:
        TypeError: ``x`` is not a dense tensor.
    """
    codec.check_tensor(x, name)
    casts = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return x.to(dtype) if casts and products.in_autocast(x.device) else x


class Linear(RoundedLayer, nn.Linear):
    """:class:`torch.nn.Linear` with rounded operands, products and sums.

    Args:
        in_features: as in torch, and so are the others.
        out_features: as there.
        bias: as there.
        device: as there.
        dtype: as there.
        formats: what is rounded to what; ``None``: nothing.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        formats: LayerFormats | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.formats = formats

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        formats, weight = self.formats, self.weight
        if not formats.rounds_in(weight.dtype):
            return F.linear(input, weight, self.bias)
        input = as_input(input, "the input", weight.dtype)
        with products.without_autocast(input.device):
            return products.linear(input, weight, self.bias, formats)


class RoundedConvolution(RoundedLayer):
    """What the convolutions have in common."""

    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any
    _reversed_padding_repeated_twice: list[int]
    _conv_forward: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | str | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        formats: LayerFormats | None = None,
    ) -> None:
        size = (in_channels, out_channels, kernel_size, stride, padding, dilation)
        super().__init__(*size, groups, bias, padding_mode, device, dtype)
        self._check_geometry()
        self.formats = formats

    def forward(self, input: Tensor) -> Tensor:
        """(batch, in_channels, *size) or (in_channels, *size) → the same with out_channels."""
        formats = self.formats
        if not formats.rounds_in(self.weight.dtype):
            result: Tensor = self._conv_forward(input, self.weight, self.bias)
            return result
        input = as_input(input, "the input", self.weight.dtype)
        with products.without_autocast(input.device):
            return self._rounded_forward(input, formats)

    def _rounded_forward(self, x: Tensor, formats: LayerFormats) -> Tensor:
        products.check_dtypes(x, self.weight)
        self._check_geometry()  # torch's own layers, which may be converted, take anything
        if not products.simulated(x, formats):
            x = products.rounded(x, "activations", formats)
            weight = products.rounded(self.weight, "weights", formats)
            y = self._conv_forward(x, weight, self.bias)
            return products.gradient_rounded(y, formats)
        dims = self.weight.dim() - 2
        if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != self.in_channels:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; a {dims}-dimensional convolution of "
                f"{self.in_channels} channels takes (batch, {self.in_channels}, *size) or "
                f"({self.in_channels}, *size), with {dims} sizes"
            )
        batched = x if x.dim() == dims + 2 else x.unsqueeze(0)
        # Padding copies numbers and does no arithmetic; backward, torch adds up what was copied.
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        padded = F.pad(batched, self._reversed_padding_repeated_twice, mode=mode)
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True)]
        if any(n < r for n, r in zip(padded.shape[2:], reach, strict=True)):
            raise ValueError(
                f"the padded input has size {tuple(padded.shape[2:])}, but the kernel with its "
                f"dilation reaches over {tuple(reach)}; pad it more, or use a smaller kernel"
            )
        y = products.convolution(
            padded, self.weight, self.bias, self.stride, self.dilation, self.groups, formats
        )
        return y if batched is x else y.squeeze(0)

    def _check_geometry(self) -> None:
        for name, least in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            value = getattr(self, name)
            if not isinstance(value, str) and min(value) < least:
                raise ValueError(f"{name} is {value}; each must be an integer of at least {least}")


class Conv1d(RoundedConvolution, nn.Conv1d):
    """:class:`torch.nn.Conv1d` with its arguments, and ``formats``: what is rounded to what."""


class Conv2d(RoundedConvolution, nn.Conv2d):
    """:class:`torch.nn.Conv2d` with its arguments, and ``formats``: what is rounded to what."""


class Conv3d(RoundedConvolution, nn.Conv3d):
    """:class:`torch.nn.Conv3d` with its arguments, and ``formats``: what is rounded to what."""
