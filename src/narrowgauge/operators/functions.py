"""Which torch functions are operators: those whose result depends on the format they compute in.

The rest only moves data (views, indexing, concatenation, comparison) and keeps the dtype of what it
is given. The trade-off: a list, which must be kept, instead of all that torch dispatches, because a
plan should name what its reader wrote, not what an operator is made of on one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]

# Words are names of functions in torch, torch.Tensor, torch.nn.functional, torch.linalg and
# torch.special. "a=b" is b counted as a. A function named with a final "_" writes into its input.
_PRODUCTS = """
    linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    matmul matmul=__matmul__ matmul=__rmatmul__ mm bmm mv dot vdot inner outer addmm addbmm addmv
    addr baddbmm einsum tensordot chain_matmul multi_dot vecdot kron cross cdist
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell
"""
_NORMS = """
    layer_norm batch_norm group_norm instance_norm rms_norm local_response_norm normalize
"""
_ACTIVATIONS = """
    relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid sigmoid=expit logsigmoid tanh
    softplus softsign hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink threshold
    prelu rrelu glu softmax log_softmax softmin gumbel_softmax dropout dropout1d dropout2d dropout3d
    alpha_dropout feature_alpha_dropout feature_dropout
"""
_ELEMENTWISE = """
    add sub sub=subtract sub=rsub sub=__rsub__ mul mul=multiply div div=divide div=true_divide
    div=__rdiv__ div=__rtruediv__ pow pow=__rpow__ pow=float_power square abs abs=absolute exp exp2
    expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh atan2 erf
    erfc erfinv lgamma digamma hypot logaddexp clamp clamp=clip clamp_min clamp_max maximum minimum
    lerp addcmul addcdiv xlogy logit sinc dist
    add=__radd__ mul=__rmul__ add=__add__ mul=__mul__ sub=__sub__ div=__truediv__ pow=__pow__
    add_=__iadd__ sub_=__isub__ mul_=__imul__ div_=__itruediv__ div_=__idiv__ pow_=__ipow__
"""
_REDUCTIONS = """
    sum mean var std var_mean std_mean prod nansum nanmean logsumexp norm vector_norm matrix_norm
    amax amin aminmax cumsum cumprod logcumsumexp trace quantile nanquantile cosine_similarity
    pairwise_distance pdist renorm scatter_add index_add scatter_reduce segment_reduce
"""
_POOLING = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d max_pool1d=max_pool1d_with_indices max_pool2d=max_pool2d_with_indices
    max_pool3d=max_pool3d_with_indices adaptive_max_pool1d=adaptive_max_pool1d_with_indices
    adaptive_max_pool2d=adaptive_max_pool2d_with_indices
    adaptive_max_pool3d=adaptive_max_pool3d_with_indices fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d=fractional_max_pool2d_with_indices
    fractional_max_pool3d=fractional_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d
    lp_pool1d lp_pool2d lp_pool3d interpolate grid_sample pad embedding embedding_bag
"""
_LOSSES = """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
    binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss hinge_embedding_loss
    cosine_embedding_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss
    multi_margin_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
    ctc_loss
"""
_LINEAR_ALGEBRA = """
    inverse=inv inverse pinverse cholesky qr svd svdvals eigvalsh eigh matrix_rank lstsq solve
"""
# Of one number each, outside the model: scaling a loss, averaging it, GradScaler. See PlanMode.
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "reciprocal"})
# Arguments in which rounding would do harm: statistics that are updated in place.
KEPT_ARGUMENTS = {"batch_norm": ("running_mean", "running_var")}
KEPT_ARGUMENTS["instance_norm"] = KEPT_ARGUMENTS["batch_norm"]
# Their kernels take a narrow input with float32 weights, and compute in float32 inside.
MIXED_NORMS = frozenset({"layer_norm", "batch_norm", "group_norm", "instance_norm"})
# Looking up commutes with rounding: the rows that are read are cast, not the whole table.
LOOKUPS = frozenset({"embedding"})


# They take lists or tuples of tensors.
NESTED = frozenset({"einsum", "multi_dot", "chain_matmul", "lstm", "gru", "rnn_tanh", "rnn_relu"})
NESTED |= {"lstm_cell", "gru_cell"}
FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


def _namespaces() -> Iterator[Any]:
    yield from (torch, torch.Tensor, F, torch._C._nn, torch.linalg, torch.special)


def _tables() -> tuple[dict[Function, str], dict[Function, int]]:
    names: dict[Function, str] = {}
    in_place_at: dict[Function, int] = {}
    groups = (_PRODUCTS, _NORMS, _ACTIVATIONS, _ELEMENTWISE, _REDUCTIONS, _POOLING, _LOSSES)
    for word in " ".join((*groups, _LINEAR_ALGEBRA)).split():
        operator, _, attribute = word.partition("=")
        for suffix in ("", "_") if not attribute else ("",):
            for namespace in _namespaces():
                function = getattr(namespace, (attribute or operator) + suffix, None)
                if function is not None and callable(function):
                    names.setdefault(function, operator + suffix)
                    if suffix == "" and "inplace" in _parameters(function):
                        in_place_at[function] = _parameters(function).index("inplace")
    return names, in_place_at


def _parameters(function: Function) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins without a signature
        return []


OPERATORS, IN_PLACE_AT = _tables()
"""The operator that each function is; the position of its argument ``inplace``, if it has one."""


def composite_functions() -> dict[Function, Function]:
    """Functions of torch that are a small model by themselves, and a form that shows its parts.

    A function that torch wrote in Python hides what it calls from a function mode. The form
    returned here is the same code, which does not ask whether a mode is there before it begins.
    """
    import types

    original = F.multi_head_attention_forward
    code = inspect.unwrap(original)
    hidden = {"has_torch_function": lambda *_: False, "has_torch_function_unary": lambda *_: False}
    shown = types.FunctionType(
        code.__code__,
        {**code.__globals__, **hidden},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    shown.__kwdefaults__ = code.__kwdefaults__
    return {original: shown}


COMPOSITES = composite_functions()


def dtypes_of(values: Iterable[Any]) -> set[torch.dtype]:
    """The dtypes of all tensors in nested tuples and lists."""
    found: set[torch.dtype] = set()
    for x in values:
        if isinstance(x, Tensor):
            found.add(x.dtype)
        elif isinstance(x, (tuple, list)):
            found |= dtypes_of(x)
    return found
