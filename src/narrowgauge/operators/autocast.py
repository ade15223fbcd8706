"""What torch.autocast does to each operator, by device: the static lists that a plan replaces.

Read from torch 2.13 (``aten/src/ATen/autocast_mode.cpp`` and ``.h``). An operator in neither list
computes in the dtype its operands come in.
"""

from __future__ import annotations

_CPU_LOW = """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc matmul
    mm bmm addmm addbmm baddbmm einsum multi_dot chain_matmul vecdot prelu tensordot inner
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell
"""
_CPU_FP32 = """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
    binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss cosine_embedding_loss
    margin_ranking_loss multilabel_margin_loss multi_margin_loss soft_margin_loss
    triplet_margin_loss ctc_loss prod quantile nanquantile trace cdist avg_pool3d
    adaptive_avg_pool3d max_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
    max_unpool1d max_unpool2d max_unpool3d grid_sample inverse pinverse cholesky qr svd svdvals
    eigvalsh eigh matrix_rank lstsq solve
"""
_CUDA_LOW = """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc matmul
    mm bmm mv addmm addmv addr addbmm baddbmm einsum multi_dot chain_matmul vecdot prelu inner
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell
"""
_CUDA_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow square
    softplus layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss
    nll_loss cross_entropy hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp interpolate prod softmax log_softmax softmin cumprod cumsum vector_norm matrix_norm
    norm sum normalize
"""
_LISTS = {
    "cpu": (frozenset(_CPU_LOW.split()), frozenset(_CPU_FP32.split())),
    "cuda": (frozenset(_CUDA_LOW.split()), frozenset(_CUDA_FP32.split())),
}
DEVICES = tuple(_LISTS)


def autocast_format(operator: str, low: str, device: str, padding: str | None = None) -> str:
    """The format in which torch.autocast lets an operator compute.

    Args:
        operator: its name, such as ``"linear"``.
        low: the low-precision format.
        device: ``"cpu"`` or ``"cuda"``.
        padding: the mode of a ``pad``, which autocast on CPUs runs in float32 if it repeats values.

    Returns:
        ``low``, ``"fp32"``, or ``"promote"``.
    """
    lows, fp32s = _LISTS[device]
    if operator == "pad":
        return "fp32" if device == "cpu" and padding in ("reflect", "replicate") else "promote"
    return low if operator in lows else "fp32" if operator in fp32s else "promote"
