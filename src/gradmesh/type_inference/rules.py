"""What each torch operator does to types over ranks: kinds of values, the language of rules, the table of operators.

Beside V, R, I and P there are three kinds that users do not see: a value that is the same on every rank but is not
declared R or I (data), zeros (the same on every rank, and also a pending sum of zeros), and an unknown value.

A rule is written over the positions of an operator's arguments::

    0+1*2      linear in 0 and, for a given 1, in 2: the sum of the terms, each a product of its factors
    0/1        linear in 0 for a given 1, and not linear in 1
    0|1        linear in 0 for a given 1; nothing is stated about 1
    0@1        linear in 0; 1, a mask or indices, chooses elements of it
    !0         not linear in 0: the result of a pending sum is not the pending sum of the results
    -0         not read: an operand that is overwritten
    =S =Z =V   made of shapes alone: the same on every rank, zeros, or uninitialized memory
    =1         made of shapes and the number 1: zeros if that is 0, else the same on every rank
    ~          random: the result is observed

Without a pending sum among the operands, all rules say the same: a result of values that are the same on every rank is
the same, if the ranks do the same; a result of a value that varies, varies.

An in-place operator has the rule of its out-of-place form, and one on lists that of its single form, for each element.
docs/reports/operators.md lists all of them and how each was tested (`python -m tools.operators`). With the empty rule,
the result of a pending sum has no known type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gradmesh.types import Type

Kind = str

V: Final = "V"
R: Final = "R"
I: Final = "I"  # noqa: E741 - the field's letter for invariant
P: Final = "P"
S: Final = "S"
"""The same on every rank, R or I as its use makes it."""
ZERO: Final = "Z"
UNKNOWN: Final = "?"

SAMES: Final = frozenset((S, R, I, ZERO))
"""The same bits on every rank."""

_SHOWN = {V: Type.V, R: Type.R, I: Type.I, P: Type.P, S: Type.R, ZERO: Type.R, UNKNOWN: None}


def shown(kind: Kind) -> Type | None:
    """The type that a user sees; None: it is not known.

    >>> shown("S"), shown("?")
    (R, None)
    """
    return _SHOWN[kind]


def flavor(kinds: Iterable[Kind]) -> Kind:
    """What comes of values that are the same on every rank: what meets an R value is one, then what meets an I value.

    >>> flavor("SIS")
    'I'
    """
    met = set(kinds)
    return R if R in met else I if I in met else S


NONLINEAR = "nonlinear-on-partial"
PRODUCT = "product-of-partials"
VARYING = "partial-times-varying"
COUNTS = "counts-many-times"
READ = "partial-read"
UNSAID = "unsaid"
"""The rule says nothing about a pending sum there: a note."""


@dataclass(frozen=True)
class Rule:
    """One rule, read."""

    text: str  # as it is written
    # the terms of the sum, each the positions of its factors, with the sign before them
    terms: tuple[tuple[tuple[int, str], ...], ...] = ()
    nonlinear: frozenset[int] = frozenset()  # the positions in which it is not linear
    unread: frozenset[int] = frozenset()  # those that are not read
    # the kind of a result that is made of shapes alone, "~" of a random one; the position of the number that
    # it is filled with
    made: str = ""


@functools.cache
def rule(text: str) -> Rule:
    """Read a rule.

    >>> rule("0+1/2").terms
    (((0, '*'),), ((1, '*'), (2, '/')))
    """
    terms: list[tuple[tuple[int, str], ...]] = []
    nonlinear, unread, made = set(), set(), ""
    for part in text.split():
        if part[0] == "!":
            nonlinear.add(int(part[1:]))
        elif part[0] == "-":
            unread.add(int(part[1:]))
        elif part[0] in "=~":
            made = part.lstrip("=")
        else:
            for term in part.split("+"):
                factors = re.findall(r"([*/|@]?)(\d+)", term)
                terms.append(tuple((int(place), sign or "*") for sign, place in factors))
    return Rule(text, tuple(terms), frozenset(nonlinear), frozenset(unread), made)


Operands = Mapping[int, Sequence[Kind]]
"""The kinds at each position: one for a tensor, several for a list, `S` for a number that is not 0, none for None."""


def outcome(of: Rule, operands: Operands) -> tuple[Kind, str]:
    """The kind of the result, and what is wrong, if anything is.

    >>> outcome(rule("0*1"), {0: "P", 1: "R"}), outcome(rule("0*1"), {0: "P", 1: "P"})
    (('P', ''), ('V', 'product-of-partials'))
    """
    if of.made:
        return (ZERO if ZERO in operands.get(int(of.made), ()) else S) if of.made.isdigit() else of.made, ""
    read = {place: kinds for place, kinds in operands.items() if place not in of.unread}
    met = {kind for kinds in read.values() for kind in kinds}
    if UNKNOWN in met:
        return UNKNOWN, ""
    if P not in met:
        if V in met:
            return V, ""
        zeros = of.terms and not of.nonlinear and all(_is_zero(term, read) for term in of.terms)
        return (ZERO if zeros else flavor(met)), ""
    holds = {place for place, kinds in read.items() if P in kinds}
    if holds & of.nonlinear:
        return V, NONLINEAR
    if not holds <= {place for term in of.terms for place, _ in term}:
        return UNKNOWN, UNSAID
    return _sum([outcome for term in of.terms for outcome in _term(term, read)])


def _is_zero(term: Sequence[tuple[int, str]], read: Operands) -> bool:
    return any(sign == "*" and read.get(place) and set(read[place]) == {ZERO} for place, sign in term)


def _term(term: Sequence[tuple[int, str]], read: Operands) -> list[tuple[Kind, str]]:
    """The kinds of a term; a list by itself is one term for each of its tensors."""
    if len(term) == 1:
        return [(kind, "") for kind in read.get(term[0][0], ())]
    if not read.get(term[0][0]):  # a factor that is not there: None
        return []
    if _is_zero(term, read):
        return [(ZERO, "")]
    pending = [sign for place, sign in term if P in read.get(place, ())]
    others = [kind for place, _ in term for kind in read.get(place, ()) if kind != P]
    if "|" in pending:
        return [(UNKNOWN, UNSAID)]
    if "/" in pending or "@" in pending:
        return [(V, NONLINEAR)]
    if len(pending) > 1:
        return [(V, PRODUCT)]
    if V in others:
        return [(V, VARYING if pending else "")]
    if pending:
        return [(P, "")]
    return [(flavor(others), "")]


def _sum(terms: Sequence[tuple[Kind, str]]) -> tuple[Kind, str]:
    for kind, problem in terms:
        if problem:
            return kind, problem
    met = {kind for kind, _ in terms}
    if P not in met:  # overwritten, or multiplied away
        return (V if V in met else ZERO if met == {ZERO} else flavor(met)), ""
    # Its sum is not what was intended: no further findings about it.
    return (UNKNOWN, COUNTS) if met & (SAMES - {ZERO}) else (P, "")


_BY_RULE = {
    # views, copies and moves; linear maps of one operand; each of a list is a term
    "0": """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d alias alias_copy as_strided
        as_strided_copy avg_pool2d avg_pool2d_backward avg_pool3d block_diag cat channel_shuffle clone col2im
        _conj _conj_physical conj_physical cumsum deg2rad detach detach_copy diag_embed diagonal
        diagonal_backward diagonal_copy expand expand_copy _fft_c2c _fft_c2r _fft_r2c flip im2col imag lift
        lift_fresh lift_fresh_copy mean narrow_copy neg _neg_view permute permute_copy pixel_shuffle
        pixel_unshuffle positive rad2deg real reflection_pad1d reflection_pad1d_backward reflection_pad2d
        reflection_pad3d repeat replication_pad1d replication_pad1d_backward replication_pad2d
        replication_pad3d _reshape_alias roll rot90 select select_backward select_copy slice slice_backward
        slice_copy split split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack sum t
        t_copy _to_copy trace transpose transpose_copy tril triu unbind unbind_copy unfold unfold_backward
        unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes _unsafe_view unsqueeze unsqueeze_copy
        upsample_bicubic2d upsample_bilinear2d _upsample_bilinear2d_aa upsample_bilinear2d_backward
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
        upsample_trilinear3d view view_as_complex view_as_complex_copy view_as_real view_as_real_copy
        view_copy
    """,
    "0+2": "constant_pad_nd",
    "0+1": "as_strided_scatter diagonal_scatter select_scatter slice_scatter",
    "0+1*2": "add sub",
    "0*2+1": "rsub",
    "0+1+0*2+1*2": "lerp",
    # products
    "0*1": """
        bmm dot ger linalg_cross matmul mm mul mv outer vdot
    """,
    "0@1": "embedding embedding_dense_backward index masked_select take _unsafe_index",
    "0@2": "gather index_select",
    "0*1*2": "_trilinear",
    "0*1+2": "convolution linear",
    "0*3+1*2*4": "addbmm addmm addmv addr baddbmm",
    "0+1*2*3": "addcmul",
    "0+1*3/2": "addcdiv",
    "0/1": """
        cholesky_solve div elu_backward gelu_backward glu_backward hardshrink_backward hardsigmoid_backward
        hardswish_backward hardtanh_backward leaky_relu_backward _log_softmax_backward_data logit_backward
        mish_backward sigmoid_backward silu_backward _softmax_backward_data softplus_backward
        softshrink_backward special_xlog1py tanh_backward threshold_backward xlogy
    """,
    "1/0": "linalg_solve_triangular",
    "0/1/2": """
        binary_cross_entropy_backward huber_loss_backward log_sigmoid_backward smooth_l1_loss_backward
    """,
    "0|1|2": "convolution_backward",
    "0|2|3|6": "nll_loss_backward",
    "0|1|3|4|5": "native_layer_norm_backward",
    "0|7": "max_pool2d_with_indices_backward",
    "0|2": "value_selecting_reduction_backward",
    "0|1|2|3|4": "native_group_norm_backward",
    # a part of one and a part of another
    "0*1+0*2": "mse_loss_backward",
    "1@0+2@0": "where",
    "0@1+2@1": "_index_put_impl _unsafe_index_put index_put masked_fill masked_scatter put",
    "0@2+3@2": "index_copy index_fill scatter",
    "0+3@2": "scatter_add",
    "0+3@2*4": "index_add",
    "1 -0": "copy fill",
    # not linear
    "!0": """
        abs acos acosh adaptive_max_pool2d all amax amin aminmax angle any argmax argmin argsort asin asinh
        atan atanh bitwise_not ceil celu clamp clamp_max clamp_min cos cosh count_nonzero cudnn_batch_norm
        cummax cummin cumprod digamma elu erf erfc erfinv exp exp2 expm1 floor frac _fused_rms_norm gelu glu
        hardshrink hardsigmoid hardswish hardtanh i0 isinf isnan isneginf isposinf kthvalue leaky_relu lgamma
        linalg_cholesky_ex _linalg_det _linalg_eigh linalg_inv_ex linalg_lu_factor_ex linalg_matrix_exp
        linalg_qr _linalg_slogdet _linalg_svd linalg_vector_norm _local_scalar_dense log log10 log1p log2
        log_sigmoid_forward _log_softmax logcumsumexp logical_not logit logsumexp max max_pool2d_with_indices
        max_pool3d_with_indices median min mish mode mvlgamma nan_to_num nanmedian nansum native_batch_norm
        _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
        native_group_norm native_layer_norm nonzero norm polygamma _prelu_kernel prod reciprocal relu relu6
        renorm round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh _softmax softplus softshrink sort
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_entr special_erfcx special_i0e
        special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_ndtri sqrt square std
        std_mean tan tanh threshold topk trunc _unique2 unique_consecutive var var_mean where.default
    """,
    "!0 !1": """
        atan2 binary_cross_entropy binary_cross_entropy_with_logits bitwise_and bitwise_or bitwise_xor
        bucketize _cdist_forward copysign dist div.Scalar_mode div.Tensor_mode eq equal floor_divide fmax fmin fmod
        ge gt heaviside huber_loss hypot igamma igammac isclose le logaddexp logaddexp2 logical_and logical_or
        logical_xor lt max.other maximum min.other minimum mse_loss ne pow remainder
        _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu searchsorted
        smooth_l1_loss soft_margin_loss special_zeta
    """,
    "!0 !1 !2": "clamp.Tensor clamp_max.Tensor clamp_min.Tensor",
    # shapes alone
    "=S": """
        arange bartlett_window blackman_window eye hamming_window hann_window linspace logspace new_ones ones
        ones_like tril_indices triu_indices
    """,
    "=0": "scalar_tensor",
    "=1": "full full_like",
    "=2": "new_full",
    "=Z": "_efficientzerotensor new_zeros zero zeros zeros_like",
    "=V": "empty empty_like empty_permuted empty_strided new_empty new_empty_strided",
    # random
    "~": """
        bernoulli binomial cauchy exponential geometric log_normal multinomial native_dropout normal
        normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm
        rrelu_with_noise _sample_dirichlet _standard_gamma uniform
    """,
    "": """
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale bincount _cdist_backward _embedding_bag
        _fused_adagrad _fused_adam _fused_adamw _fused_rms_norm_backward _fused_sgd histc index_reduce
        _linalg_solve_ex multi_margin_loss native_batch_norm_backward nextafter nll_loss2d_forward
        nll_loss_forward _pdist_forward _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu_backward scatter.reduce scatter.value_reduce
        scatter_reduce
    """,
}

TABLE = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
"""The rule of each operator, by its name in `torch.ops.aten`, and of an overload that is not as the others, by both."""


def rule_of(name: str, overload: str = "") -> str | None:
    """The rule of an operator, None where there is none.

    >>> rule_of("div"), rule_of("div_", "Tensor_mode"), rule_of("_foreach_mul_"), rule_of("mull")
    ('0/1', '!0 !1', '0*1', None)
    """
    plain = name.removeprefix("_foreach_")
    for one in (name, plain, plain.removesuffix("_")):
        for whole in (f"{one}.{overload}", one):
            if whole in TABLE:
                return TABLE[whole]
    return None
