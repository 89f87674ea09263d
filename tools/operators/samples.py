"""Arguments for each operator of the table, by families: one line serves many.

A sample is a Python expression for the arguments. Names in it are operands:

    x y z    3 x 4, between 0.2 and 0.8; h between 1.2 and 2; u v of 4; m of 4 x 3; a b of 2 x 3 x 4; c of 2 x 4 x 3
    X L      positive definite, 3 x 3, and only its lower triangle
    n k      an image, 1 x 2 x 6 x 6, and a kernel; n1 n3 with one and three dimensions
    q p      complex, 3 x 4; pairs, 3 x 2
    i I F    numbers that stand once along a dimension; t numbers; K a mask; s a scalar
    others   of the shapes that stand below
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor to be filled in."""

    shape: tuple[int, ...]
    low: float = 0.2  # the least value
    high: float = 0.8  # the largest
    dtype: torch.dtype = torch.float64  # its dtype; integers and masks are the same on every rank
    definite: bool = False  # whether it is to be positive definite
    lower: bool = False  # whether only the triangle below the diagonal is used
    unique: bool = False  # of numbers, whether each stands once along dim 0

    @property
    def typed(self) -> bool:
        """Whether it can be anything over the ranks."""
        return self.dtype.is_floating_point or self.dtype.is_complex


def _named() -> dict[str, object]:
    whole = torch.int64
    made: dict[str, object] = {name: Operand((3, 4)) for name in ("x", "y", "z")}
    made |= {name: Operand((4,)) for name in ("u", "v")} | {name: Operand((2, 3, 4)) for name in ("a", "b")}
    made |= {
        "X": Operand((3, 3), definite=True),
        "m": Operand((4, 3)),
        "c": Operand((2, 4, 3)),
        "h": Operand((3, 4), 1.2, 2.0),
        "n": Operand((1, 2, 6, 6)),
        "n1": Operand((1, 2, 6)),
        "n3": Operand((1, 2, 4, 4, 4)),
        "k": Operand((2, 2, 3, 3)),
        "q": Operand((3, 4), dtype=torch.complex128),
        "p": Operand((3, 2)),
        "L": Operand((3, 3), definite=True, lower=True),
        "i": Operand((2,), 0, 3, whole, unique=True),
        "I": Operand((2, 4), 0, 3, whole, unique=True),
        "F": Operand((5,), 0, 12, whole, unique=True),
        "f": Operand((5,)),
        "t": Operand((3,), 0, 4, whole),
        "K": Operand((3, 4), 0, 2, torch.bool),
        "s": Operand(()),
        "f64": torch.float64,
    }
    shapes = {
        "w": (3, 8),
        "w4": (3, 4),
        "g": (3, 3),
        "Z": (3, 3),
        "d": (4, 3),
        "d2": (2, 4),
        "e": (3,),
        "j": (3,),
        "j2": (2,),
        "j3": (2,),
        "l": (2, 3, 3),
        "o": (2, 2, 2),
        "e1": (3, 1),
        "e2": (3, 1),
        "e3": (1, 2),
        "e4": (1, 2),
        "m2": (2, 3),
        "n_": (1, 2, 6, 6),
        "n4": (1, 4, 2, 2),
        "n5": (1, 2, 3, 3),
        "n6": (3, 3, 2),
        "n8": (1, 2, 8),
        "n9": (1, 4, 4),
        "s_": (),
        "u4": (1, 4),
        "v1": (4,),
        "v2": (4,),
        "x4": (1, 2, 3, 4),
        "y4": (1, 2, 3, 4),
        "z4": (1, 2, 3, 4),
    }
    made |= {name: Operand(shape) for name, shape in shapes.items()}
    made["t4"], made["w5"] = Operand((4,), 0, 3, whole), Operand((1, 2, 3, 3), 0, 36, whole)
    return made


# Several operators a line; a name with a dot says which overload.
_FAMILIES = {
    "x": """
        _neg_view alias alias_copy clone conj_physical deg2rad detach detach_copy lift lift_fresh
        lift_fresh_copy mean neg positive rad2deg sum t t_copy unbind.int tril triu squeeze squeeze_copy
        _to_copy unbind_copy.int abs acos angle all any asin asinh atan atanh ceil celu cos cosh count_nonzero
        digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu glu hardshrink hardsigmoid hardswish
        hardtanh i0 isinf isnan isneginf isposinf leaky_relu lgamma linalg_vector_norm log log10 log1p log2
        logical_not logit max min median argmax argmin mish nan_to_num nanmedian nansum nonzero norm prod
        reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_entr special_erfcx special_i0e
        special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_ndtri sqrt square std tan
        tanh trunc var diagonal diagonal_copy var_mean std_mean _unique2 unique_consecutive
        log_sigmoid_forward where.default argsort sort aminmax ones_like empty_like zeros_like zero rand_like
        randn_like bernoulli exponential normal_functional uniform cauchy log_normal random poisson
        _standard_gamma _sample_dirichlet
    """,
    "h": "acosh",
    "h, 1": "mvlgamma",
    "q": "_conj _conj_physical imag real view_as_real view_as_real_copy",
    "p": "view_as_complex view_as_complex_copy",
    "x, [4, 3]": "view view_copy repeat _unsafe_view new_empty new_zeros new_ones",
    "x, [4, 3], 2.0": "new_full",
    "x, [4, 3], 0.0": "new_full",
    "x, [4, 3], [3, 1]": "_reshape_alias new_empty_strided",
    "x, 0": """
        cumsum unsqueeze unsqueeze_copy cumprod cummax cummin logcumsumexp mode diag_embed prod.dim_int
        median.dim nanmedian.dim max.dim min.dim squeeze.dim all.dim any.dim argmax argmin squeeze_copy.dim
        argsort sort eq.Scalar ne.Scalar full_like
    """,
    "x, 1, 0": "kthvalue select.int select_copy.int",
    "x, [0]": "sum.dim_IntList mean.dim flip amax amin logsumexp nansum var.dim std.dim var_mean.dim std_mean.dim",
    "x, [1], [0]": "roll",
    "x, 1, [0, 1]": "rot90",
    "x, [3, 4]": "expand expand_copy",
    "x, [1, 0]": "permute permute_copy",
    "x, 0, 1": "transpose transpose_copy",
    "x, 1, 1, 3": "slice.Tensor slice_copy.Tensor",
    "x, 1, 1, 2": "narrow_copy unfold unfold_copy",
    "x, 2, 0": "split.Tensor split_copy.Tensor unsafe_split.Tensor",
    "x, 2, 1": "unsafe_chunk topk",
    "x, [1, 2], 0": "split_with_sizes split_with_sizes_copy unsafe_split_with_sizes",
    "x, [2, 3], [4, 1], 1": "as_strided as_strided_copy",
    "x, [1, 1, 0, 2]": "constant_pad_nd",
    "x, [1, 1, 0, 2], 0.5": "constant_pad_nd",
    "x, 3": """
        pow.Tensor_Scalar clamp_min remainder.Scalar fill.Scalar multinomial full_like
    """,
    "x, 0.5": """
        add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar mul.Scalar div.Scalar rsub.Scalar clamp
        clamp_max ge.Scalar gt.Scalar le.Scalar lt.Scalar fmod.Scalar geometric xlogy.Scalar_Other
    """,
    "2, x": "polygamma",
    "x, 0.1, 0.3": "threshold",
    "x, 2, 0, 0.5": "renorm",
    "x, 1, False": "_softmax _log_softmax",
    "X": """
        trace _linalg_det _linalg_eigh _linalg_slogdet _linalg_svd linalg_cholesky_ex linalg_inv_ex
        linalg_lu_factor_ex linalg_matrix_exp linalg_qr
    """,
    "x, y": """
        add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor xlogy.Tensor special_xlog1py atan2
        copysign.Tensor dist eq.Tensor floor_divide fmax fmin fmod.Tensor ge.Tensor gt.Tensor heaviside hypot
        igamma igammac isclose le.Tensor logaddexp logaddexp2 logical_and logical_or logical_xor lt.Tensor
        maximum minimum mse_loss ne.Tensor nextafter pow.Tensor_Tensor remainder.Tensor smooth_l1_loss
        huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits max.other min.other
        copy sigmoid_backward silu_backward tanh_backward hardsigmoid_backward hardswish_backward
        mish_backward gelu_backward logit_backward clamp_min.Tensor clamp_max.Tensor clamp.Tensor
        _prelu_kernel
    """,
    "x, y, alpha=0": "add.Tensor sub.Tensor rsub.Tensor",
    "x, y, z, value=0": "addcmul addcdiv",
    "h, x": "special_zeta",
    "x, s": "fill.Tensor",
    "x, y, rounding_mode='floor'": "div.Tensor_mode",
    "x, y, 0.3": "lerp.Scalar threshold_backward hardshrink_backward softshrink_backward",
    "x, y, -0.5, 0.5": "hardtanh_backward",
    "x, y, 1.0, 20.0": "softplus_backward",
    "x, y, 0.1, False": "leaky_relu_backward",
    "x, 1.0, 1.0, 1.0, False, y": "elu_backward",
    "w4, w, 1": "glu_backward",
    "x, y, z": "lerp.Tensor addcmul addcdiv log_sigmoid_backward binary_cross_entropy_backward",
    "x, y, z, 1": "mse_loss_backward",
    "x, y, z, 1, 1.0": "smooth_l1_loss_backward huber_loss_backward",
    "x, y, 1, f64": "_softmax_backward_data _log_softmax_backward_data",
    "[x, y]": "cat stack block_diag",
    "x, m": "mm matmul",
    "a, c": "bmm",
    "u, v": "dot vdot outer ger",
    "x, u": "mv bucketize.Tensor",
    "X, Z": "linalg_cross",
    "g, y, m": "addmm",
    "g, y, m, beta=0": "addmm",
    "g, y, m, beta=0.5, alpha=0": "addmm",
    "d, u, e": "addr",
    "j, x, u": "addmv",
    "g, a, c": "addbmm",
    "l, a, c": "baddbmm",
    "x, y, None": "linear",
    "x, y, j": "linear",
    "p, o, p, [1, 3], [0], [1, 2], [2, 3]": "_trilinear",
    "n, k, j2, [1, 1], [1, 1], [1, 1], False, [0, 0], 1": "convolution",
    "n, k, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1": "convolution",
    "n, n_, k, [2], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]": "convolution_backward",
    "Z, L": "cholesky_solve",
    "X, Z, upper=True": "linalg_solve_triangular",
    "n, [2, 2]": "avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices",
    "n3, [2, 2, 2]": "avg_pool3d _adaptive_avg_pool3d max_pool3d_with_indices",
    "n5, n": "_adaptive_avg_pool2d_backward",
    "n5, n, [2, 2], [2, 2], [0, 0], False, True, None": "avg_pool2d_backward",
    "n1, [1, 1]": "reflection_pad1d replication_pad1d",
    "n, [1, 1, 2, 0]": "reflection_pad2d replication_pad2d",
    "n3, [1, 1, 1, 1, 1, 1]": "reflection_pad3d replication_pad3d",
    "n8, n1, [1, 1]": "reflection_pad1d_backward replication_pad1d_backward",
    "n4, 2": "pixel_shuffle channel_shuffle",
    "n, 2": "pixel_unshuffle",
    "n, [3, 3], [1, 1], [0, 0], [1, 1]": "im2col",
    "n9, [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]": "col2im",
    "n1, [9]": "upsample_nearest1d",
    "n1, [9], False": "upsample_linear1d",
    "n, [9, 9]": "upsample_nearest2d",
    "n, [9, 9], False": "upsample_bilinear2d upsample_bicubic2d",
    "n, [3, 3], False": "_upsample_bilinear2d_aa",
    "n3, [5, 5, 5]": "upsample_nearest3d",
    "n3, [5, 5, 5], False": "upsample_trilinear3d",
    "n, [6, 6], [1, 2, 3, 3]": "upsample_nearest2d_backward",
    "n, [6, 6], [1, 2, 3, 3], False": "upsample_bilinear2d_backward",
    "x, [1], 0, True": "_fft_r2c",
    "q, [0, 1], 0, True": "_fft_c2c",
    "q, [1], 0, 6": "_fft_c2r",
    "x, [0], correction=1": "var.correction std.correction",
    "x, [K]": "index.Tensor",
    "x, [i]": "index.Tensor _unsafe_index.Tensor",
    "x, F": "take",
    "x, K": "masked_select",
    "x, 0, i": "index_select",
    "x, 0, I": "gather",
    "x, i": "embedding",
    "d2, i, 5, -1, False": "embedding_dense_backward",
    "x, 0, I, y": "scatter.src scatter_add",
    "x, 0, I, 0.5": "scatter.value",
    "x, 0, I, y, reduce='multiply'": "scatter.reduce",
    "x, 0, I, y, reduce='amax'": "scatter_reduce.two",
    "x, 0, i, d2": "index_add index_copy",
    "x, 0, i, d2, alpha=0": "index_add",
    "x, 0, i, d2, reduce='amax'": "index_reduce",
    "x, 0, i, 0.5": "index_fill.int_Scalar",
    "x, 0, i, s": "index_fill.int_Tensor",
    "x, [i], d2": "index_put _unsafe_index_put",
    "x, [i], d2, True": "index_put",
    "x, F, f": "put",
    "x, K, 0.5": "masked_fill.Scalar",
    "x, K, 0.0": "masked_fill.Scalar",
    "x, K, s": "masked_fill.Tensor",
    "x, K, y": "masked_scatter",
    "K, x, y": "where.self",
    "x, u, 0, 1": "select_scatter",
    "x, u4, 0, 1, 2": "slice_scatter",
    "x, j, 0": "diagonal_scatter",
    "x, m2, [2, 3], [4, 1], 1": "as_strided_scatter",
    "u, [3, 4], 0, 1": "select_backward",
    "u4, [3, 4], 0, 1, 2, 1": "slice_backward",
    "j, [3, 4], 0, 0, 1": "diagonal_backward",
    "n6, [3, 4], 1, 2, 1": "unfold_backward",
    "u, 0, t4, [3, 4], False": "value_selecting_reduction_backward",
    "x, y, 2.0, None": "_cdist_forward",
    "u, x": "searchsorted.Tensor",
    "x, [4], u, v, 1e-5": "native_layer_norm",
    "x, y, [4], e1, e2, u, v, [True, True, True]": "native_layer_norm_backward",
    "n, j2, j3, 1, 2, 36, 2, 1e-5": "native_group_norm",
    "n, n_, e3, e4, j2, 1, 2, 36, 2, [True, True, True]": "native_group_norm_backward",
    "x, u, v, None, None, True, 0.1, 1e-5": "native_batch_norm",
    "x, u, v, True, 0.1, 1e-5": "_native_batch_norm_legit.no_stats",
    "x, u, v, v1, v2, True, 0.1, 1e-5": "_native_batch_norm_legit_functional",
    "x, u, v, v1, v2, 0.1, 1e-5": "_native_batch_norm_legit_no_training",
    "x, t, None, 1, -100": "nll_loss_forward",
    "s, x, t, None, 1, -100, s_": "nll_loss_backward",
    "n5, n, [2, 2], [2, 2], [0, 0], [1, 1], False, w5": "max_pool2d_with_indices_backward",
    "x4, y4, z4": "_scaled_dot_product_flash_attention_for_cpu",
    "x, 10": "histc",
    "x, t, 1, 1, None, 1": "multi_margin_loss",
    "x, 0.5, True": "native_dropout",
    "I": "bitwise_not",
    "t": "bincount",
    "I, I": "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor",
    "[3]": "zeros ones rand randn empty.memory_format",
    "[3], 2.0": "full",
    "[3], 0.0": "full",
    "0.0": "scalar_tensor",
    "3": "eye arange bartlett_window blackman_window hamming_window hann_window randperm scalar_tensor",
    "0, 1, 5": "linspace logspace",
    "3, 4": "tril_indices triu_indices",
    "5, [3]": "randint",
    "[3, 4], [0, 1]": "empty_permuted",
    "[3, 4], [4, 1]": "empty_strided",
    "x, 5": "randint_like",
    "x, y, 0.1, 0.3, True": "rrelu_with_noise",
}

SAMPLES: list[tuple[str, str]] = [(name, text) for text, names in _FAMILIES.items() for name in names.split()]
"""An operator, perhaps with its overload, and the expression for its arguments."""


def arguments(text: str) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a sample, with operands where tensors have to be filled in."""

    def taken(*args: object, **kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
        return args, kwargs

    made: tuple[tuple[object, ...], dict[str, object]] = eval(f"taken({text})", {"taken": taken, **_named()})
    return made


def operands(value: object) -> Iterator[Operand]:
    """The operands among arguments, in order."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, dict):
        yield from (one for inner in value.values() for one in operands(inner))
    elif isinstance(value, list | tuple):
        yield from (one for inner in value for one in operands(inner))
