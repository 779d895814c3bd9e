"""What one call of a torch operation costs: the table of operations, and the rule for element-wise ones.

    products       2 FLOPs a MAC, and one for each element to which a bias is added
    element-wise   one FLOP for each element of the result, if that is a floating-point number
    sums, softmax  one for each element that is read, or added to a place by its index
    norms          4 for each element, 5 with a weight; their backward counts twice
    copies         none: also views, indexing, comparisons, random numbers, embeddings, messages

The weights of norms, softmax and pooling are DeepSpeed's. Fused attention counts its products alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import formulas

Work = tuple[int, int]  # MACs, FLOPs
Formula = Callable[[tuple[Any, ...], Mapping[str, Any], Any], Work]  # of arguments and result

_aten = torch.ops.aten
NONE: Work = (0, 0)


# ---- products -------------------------------------------------------------------------------------


def _two(macs: int, extra: int = 0) -> Work:
    return macs, 2 * macs + extra


def _mm(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return _two(formulas.matmul(args[0].shape, args[1].shape))


def _mv(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return _two(args[0].numel())


def _scaled_mm(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    bias = args[4] if len(args) > 4 else kwargs.get("bias")
    extra = 0 if bias is None else out.numel()
    return _two(formulas.matmul(args[0].shape, args[1].shape), extra)


def _addmm(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    added = out.numel() if kwargs.get("beta", 1) != 0 else 0
    return _two(formulas.matmul(args[1].shape, args[2].shape), added)


def _addmv(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return _two(args[1].numel(), out.numel() if kwargs.get("beta", 1) != 0 else 0)


def _grouped_mm(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return _two(formulas.grouped_matmul(args[0].shape, args[1].shape))


def _convolution(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    x, weight, bias = args[:3]
    macs = formulas.convolution(x.shape, weight.shape, out.shape, is_transposed=args[6])
    return _two(macs, 0 if bias is None else out.numel())


def _convolution_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    grad, x, weight = args[:3]
    is_transposed, mask = args[7], args[10]
    macs = formulas.convolution(x.shape, weight.shape, grad.shape, is_transposed=is_transposed)
    return _two(macs * (mask[0] + mask[1]), grad.numel() if mask[2] else 0)


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return _two(formulas.attention(*(x.shape for x in args[:3])))


def _attention_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return _two(formulas.attention_backward(*(x.shape for x in args[1:4])))


def _onednn_layer(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    x, *weights = args[:5]
    return _two(formulas.recurrent(prod(x.shape[:-1]), [w.shape for w in weights]))


def _onednn_layer_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    macs, flops = _onednn_layer(args, kwargs, out)
    return 2 * macs, 2 * flops


def _cudnn_layers(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    x, weights = args[:2]
    return _two(formulas.recurrent(prod(x.shape[:-1]), [w.shape for w in weights]))


def _cudnn_layers_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    macs, flops = _cudnn_layers(args, kwargs, out)
    return 2 * macs, 2 * flops


_PRODUCTS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm"), _mm),
    **dict.fromkeys(("mv", "dot", "vdot"), _mv),
    **dict.fromkeys(("addmm", "_addmm_activation", "baddbmm", "addbmm"), _addmm),
    "addmv": _addmv,
    "_scaled_mm": _scaled_mm,
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped_mm),
    "convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    "convolution_backward_overrideable": _convolution_backward,
    **{
        f"_scaled_dot_product_{kind}attention{where}": _attention
        for kind, where in (
            *(("flash_", ""), ("flash_", "_for_cpu"), ("efficient_", ""), ("cudnn_", "")),
            *(("fused_", "_overrideable"), ("", "_math_for_mps")),
        )
    },
    **{
        f"_scaled_dot_product_{kind}attention{where}_backward": _attention_backward
        for kind, where in (
            *(("flash_", ""), ("flash_", "_for_cpu"), ("efficient_", ""), ("cudnn_", "")),
            ("fused_", "_overrideable"),
        )
    },
    "mkldnn_rnn_layer": _onednn_layer,
    "mkldnn_rnn_layer_backward": _onednn_layer_backward,
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _cudnn_layers),
    **dict.fromkeys(("_cudnn_rnn_backward", "miopen_rnn_backward"), _cudnn_layers_backward),
}


# ---- element by element ---------------------------------------------------------------------------


def _numel(value: Any) -> int:
    """The elements of the first tensor of a result that holds floating-point numbers."""
    if isinstance(value, Tensor):
        return value.numel() if value.is_floating_point() or value.is_complex() else 0
    if isinstance(value, (tuple, list)) and value:
        return _numel(value[0])
    return 0


def _each_result(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return 0, _numel(out)


def _each_input(times: int = 1, at: int = 0) -> Formula:
    """`times` FLOPs for each element of argument number `at`."""

    def formula(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
        return 0, times * _numel(args[at])

    return formula


def _each_of_list(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    return 0, sum(_numel(tensor) for tensor in args[0])


def _each_target(at: int = 1) -> Formula:
    """One FLOP for each element of argument number `at`, which are whole numbers."""

    def formula(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
        return 0, args[at].numel()

    return formula


def _norm(weight_at: int, times: int = 1, at: int = 0) -> Formula:
    """A norm of argument number `at`: 4 FLOPs an element, 5 where argument `weight_at` is a weight."""

    def formula(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
        weight = args[weight_at] if len(args) > weight_at else None
        return 0, times * (4 if weight is None else 5) * _numel(args[at])

    return formula


def _batch_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    """With the statistics of the batch as other norms; with stored ones one FLOP, two with a weight."""
    x, weight, is_training = args[0], args[1], args[5]
    return 0, _numel(x) * (3 * bool(is_training) + (1 if weight is None else 2))


def _index_put(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Work:
    """Additions where it accumulates, as in the backward of indexing."""
    is_sum = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return 0, _numel(args[2]) if is_sum else 0


_ELEMENTS: dict[str, Formula] = {
    **dict.fromkeys(
        (
            *("sum", "nansum", "mean", "nanmean", "prod", "var", "std", "var_mean", "std_mean"),
            *("cumsum", "cumprod", "logcumsumexp", "logsumexp", "norm", "linalg_vector_norm"),
            *("_softmax", "_safe_softmax", "_log_softmax", "dist", "trace"),
            *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss"),
            *("multilabel_margin_loss_forward", "_ctc_loss", "log_sigmoid_forward", "glu"),
            *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d"),
            *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool1d", "max_pool2d"),
            *("max_pool2d_with_indices", "max_pool3d_with_indices"),
            *("adaptive_max_pool2d", "adaptive_max_pool3d"),
        ),
        _each_input(),
    ),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data", "_masked_softmax_backward"),
        _each_input(2),
    ),
    "_masked_softmax": _each_input(),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _each_target()),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _each_target(2)),
    **dict.fromkeys(
        (
            *("native_dropout", "native_dropout_backward", "_fused_dropout", "addr", "hypot"),
            *("prelu", "_prelu_kernel", "rrelu_with_noise", "_prelu_kernel_backward"),
            *("glu_backward", "log_sigmoid_backward", "mse_loss_backward"),
            *("smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward"),
            *("avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward"),
            *("_adaptive_avg_pool3d_backward", "max_pool2d_with_indices_backward"),
            *("max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward"),
            *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d")),
            *(f"upsample_{kind}" for kind in ("bilinear2d", "trilinear3d", "bicubic2d")),
            *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
            *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "renorm", "lerp"),
            "linalg_cross",
        ),
        _each_result,
    ),
    **dict.fromkeys(("index_add", "index_add_", "scatter_add", "scatter_add_"), _each_input(at=3)),
    "embedding_dense_backward": _each_input(),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _index_put),
    "native_layer_norm": _norm(2),
    "native_layer_norm_backward": _norm(5, times=2),
    "native_group_norm": _norm(1),
    "native_group_norm_backward": _norm(4, times=2),
    "_fused_rms_norm": _norm(2),
    "_fused_rms_norm_backward": _norm(4, times=2),
    **dict.fromkeys(
        ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"), _batch_norm
    ),
    "native_batch_norm_backward": _norm(2, times=2),
}

# element-wise by torch's mark, but they compute nothing
_COPIES = frozenset(
    (
        *("clone", "copy", "copy_", "_to_copy", "fill", "fill_", "zero_", "where", "lift_fresh"),
        *("masked_fill", "masked_fill_", "nan_to_num", "nan_to_num_", "conj_physical", "real"),
        *("alias", "view_as_real", "_conj", "bernoulli_", "bitwise_and", "bitwise_or"),
    )
)

# not element-wise, with floating-point results, and they compute nothing
_MOVES = frozenset(
    (
        *("cat", "stack", "_unsafe_view", "_reshape_alias", "constant_pad_nd", "tril", "triu"),
        *("embedding", "index", "index_select", "index_copy", "gather", "scatter", "scatter_"),
        *("index_fill", "index_fill_"),
        *("masked_select", "masked_scatter", "masked_scatter_", "masked_scatter_backward"),
        *("topk", "sort", "argsort", "max", "min", "amax", "amin", "aminmax", "median", "mode"),
        *("kthvalue", "cummax", "cummin", "flip", "roll", "rot90", "repeat", "tile", "unfold"),
        *("slice_backward", "select_backward", "unfold_backward", "diagonal_backward", "diag"),
        *("slice_scatter", "select_scatter", "as_strided_scatter", "diagonal_scatter", "im2col"),
        *("col2im", "pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle", "set_"),
        *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
        *("resize_", "normal_", "uniform_", "random_", "exponential_", "multinomial", "randperm"),
        *("bernoulli", "normal", "histc", "bincount", "repeat_interleave", "unique_consecutive"),
        *("_local_scalar_dense", "record_stream", "split_with_sizes_copy", "narrow_copy", "item"),
        *("_weight_norm_interface", "_pin_memory", "lift", "detach_", "_efficientzerotensor"),
        *("unsafe_split", "unsafe_chunk", "tensor_split", "block_diag", "_nested_tensor_from_mask"),
    )
)
_FACTORIES = (
    *("empty", "new_", "zeros", "ones", "full", "arange", "eye", "linspace", "logspace"),
    *("scalar_tensor", "rand", "_empty", "_assert", "sym_"),
)
# of messages, and the engine's own kernels for messages and updates
_OTHERS = ("c10d", "_c10d_functional", "xds", "prim", "prims", "profiler")


def formula_of(operation: Any) -> Formula | None:
    """The cost of a call of `operation`, an overload. None: it computes nothing.

    Raises:
        KeyError: it is not known what it computes.
    """
    if operation.is_view:
        return None
    name = operation._schema.name.rpartition("::")[2]
    if operation.namespace == "aten":
        found = _PRODUCTS.get(name) or _ELEMENTS.get(name)
        if found is not None:
            return found
        if name.startswith("_foreach_"):
            return None if name.startswith(("_foreach_copy", "_foreach_zero")) else _each_of_list
        if name in _COPIES or name in _MOVES or name.startswith(_FACTORIES):
            return None
    if torch.Tag.pointwise in operation.tags:
        return _each_result
    if operation.namespace in _OTHERS:
        return None
    raise KeyError(operation)


__all__ = ["NONE", "Formula", "Work", "formula_of"]
