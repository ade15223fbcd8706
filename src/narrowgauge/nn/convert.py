"""Turns the layers of an existing model into those that round, in place, and back.

A layer only changes its class, so everything that refers to it or to its parameters stays valid:
optimizers, hooks, checkpoints, DDP. That works for torch's own classes alone; a subclass may
compute something else, so it is refused rather than guessed about or passed over.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.nn.attention import MultiheadAttention
from narrowgauge.nn.layer_formats import LayerFormats
from narrowgauge.nn.layers import Conv1d, Conv2d, Conv3d, Linear, RoundedLayer

_TWINS: dict[type[nn.Module], type[RoundedLayer]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.MultiheadAttention: MultiheadAttention,
}
_ORIGINALS: dict[type[nn.Module], type[nn.Module]] = {
    ours: torchs for torchs, ours in _TWINS.items()
}
_KINDS = tuple(_TWINS)
_NESTED = "_used_nested_tensor"  # on an encoder: what use_nested_tensor was
Model = TypeVar("Model", bound=nn.Module)


def convert(model: Model, formats: LayerFormats | Mapping[str, LayerFormats | None]) -> Model:
    """Let a model's layers round as :class:`LayerFormats` say, in place.

    Every ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d`` and ``nn.MultiheadAttention``
    that is meant becomes the layer of that name here. Layers of other kinds are left alone.
    Parameters, buffers, names, hooks and modes stay what they are. Converting again replaces the
    formats. Nothing is changed if an error is raised.

    Args:
        model: the model, or a single layer.
        formats: for all layers; or by name, the first match wins: a layer's name, a module's name
            (all layers below it), or a pattern such as ``"*.attn"``. ``None`` means that a layer
            is torch's own. Layers that no name matches stay as they are.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` or a value is of the wrong type.
        ValueError: a name matches no layer that can be converted; a layer that is meant is of a
            subclass or has parametrizations; a layer used under two names matches in two ways.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
    if isinstance(formats, LayerFormats):
        formats = {"*": formats}
    if not isinstance(formats, Mapping):
        raise TypeError(
            f"formats is {type(formats).__name__}; it must be a LayerFormats, or a dict from names "
            "to them"
        )
    for pattern, value in formats.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"formats has the key {pattern!r}, which is {type(pattern).__name__}; it must be a "
                "str: a layer's name, a module's name, or a pattern such as '*.attn'"
            )
        if value is not None and not isinstance(value, LayerFormats):
            raise TypeError(
                f"formats[{pattern!r}] is {type(value).__name__}; it must be a LayerFormats or None"
            )
    layers = _layers(model)
    for pattern in formats:
        _check_pattern(pattern, layers, model)
    meant = []
    for layer, names in layers:
        matches = [_first(name, formats) for name in names]
        if any(match != matches[0] for match in matches):
            raise ValueError(
                f"one layer is used as {', '.join(map(repr, names))}, which match different names "
                f"of formats; let one match them all"
            )
        if matches[0] is not None:
            meant.append((layer, names[0], formats[matches[0]]))
    for layer, name, value in meant:
        if value is not None:
            _check_class(layer, name)
    for layer, _, value in meant:
        if value is None:
            _restore(layer)
        else:
            _set(layer, value)
    _keep_encoders_dense(model)
    return model


def deconvert(model: Model) -> Model:
    """Turn all layers of this module back into torch's own, in place.

    Layers of a class derived from one here keep it, and round nothing any more.

    Returns:
        The same model.
    """
    for layer, _ in _layers(model):
        _restore(layer)
    _keep_encoders_dense(model)
    return model


def _layers(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Every layer of a kind that can be converted, with all of its names."""
    found: dict[nn.Module, list[str]] = {}
    parts = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _KINDS) and name not in parts:
            found.setdefault(module, []).append(name)
        if isinstance(module, nn.MultiheadAttention):
            # Under this name attention reads its weights and never calls it.
            parts.add(f"{name}.out_proj" if name else "out_proj")
    return list(found.items())


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _first(name: str, patterns: Mapping[str, object]) -> str | None:
    return next((pattern for pattern in patterns if _matches(name, pattern)), None)


def _check_pattern(
    pattern: str, layers: list[tuple[nn.Module, list[str]]], model: nn.Module
) -> None:
    names = [name for _, all_names in layers for name in all_names]
    if any(_matches(name, pattern) for name in names):
        return
    kinds = ", ".join(kind.__name__ for kind in _TWINS)
    for name, module in model.named_modules(remove_duplicate=False):
        if name == pattern and isinstance(module, nn.Linear):  # and yet not among the layers
            raise ValueError(
                f"formats names {pattern!r}, which is a part of {name.rpartition('.')[0]!r}, a "
                "MultiheadAttention; name that"
            )
    modules = {name.rsplit(".", 1)[0] for name in names}
    close = difflib.get_close_matches(pattern, sorted(modules | set(names)), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    raise ValueError(
        f"formats names {pattern!r}, which matches no {kinds}{hint} Layers: {listed or 'none'}"
    )


def _check_class(layer: nn.Module, name: str) -> None:
    if type(layer) in _TWINS or isinstance(layer, RoundedLayer):
        return
    if nn.utils.parametrize.is_parametrized(layer):
        raise ValueError(
            f"layer {name!r} is parametrized; convert it before that, or leave it out with "
            f"{{{name!r}: None, …}}"
        )
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise ValueError(
            f"layer {name!r} is a {type(layer).__name__}, whose size is not known yet; call the "
            f"model once before converting, or leave it out with {{{name!r}: None, …}}"
        )
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        raise ValueError(
            f"layer {name!r} is a {type(layer).__name__}, as is the out_proj of a "
            f"MultiheadAttention, which it is a part of; make {name!r} an nn.Linear with the same "
            f"parameters, or leave it out with {{{name!r}: None, …}}"
        )
    base = next(original for original in _TWINS if isinstance(layer, original))
    raise ValueError(
        f"layer {name!r} is a {type(layer).__name__}, a subclass of {base.__name__} that may "
        f"compute something else; derive it from narrowgauge.nn.{base.__name__}, or leave it "
        f"out with {{{name!r}: None, …}}"
    )


def _set(layer: nn.Module, formats: LayerFormats) -> None:
    if type(layer) in _TWINS:
        layer.__class__ = _TWINS[type(layer)]
    assert isinstance(layer, RoundedLayer)
    layer.formats = formats


def _restore(layer: nn.Module) -> None:
    if type(layer) in _ORIGINALS:
        assert isinstance(layer, RoundedLayer)
        layer.forget_formats()
        layer.__class__ = _ORIGINALS[type(layer)]  # type: ignore[assignment]
    elif isinstance(layer, RoundedLayer):
        layer.formats = LayerFormats()


def _keep_encoders_dense(model: nn.Module) -> None:
    """Let encoders whose layers round pass dense tensors, as they do in training, and only those.

    In eval mode with a padding mask torch.nn.TransformerEncoder would make nested tensors, which
    only the fused kernel understands that these layers keep it from using.
    """
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        rounds = any(isinstance(x, RoundedLayer) and x.rounds for x in encoder.modules())
        if rounds and getattr(encoder, "use_nested_tensor", False):
            encoder.__dict__[_NESTED] = encoder.use_nested_tensor
            encoder.use_nested_tensor = False
        elif not rounds and _NESTED in encoder.__dict__:
            encoder.use_nested_tensor = encoder.__dict__.pop(_NESTED)
