"""What each operator of torch does to types over ranks: one rule for each, in the language of `gradmesh.inference.rules`.

An operator in place has the rule of its twin, and one on lists that of its twin on each. docs/operators.md lists them all
and how each was proven (`python -m tools.operators`). The empty rule says nothing of pending sums: what such an
operator makes of one has no known type.
"""

from __future__ import annotations

__all__ = ["TABLE", "rule_of"]

_BY_RULE = {
    # views, copies and moves; linear maps of one operand; each of a list is a term
    "0": """
        _conj _conj_physical _fft_c2c _fft_c2r _fft_r2c _neg_view _reshape_alias _to_copy _unsafe_view
        _adaptive_avg_pool2d _adaptive_avg_pool3d alias alias_copy as_strided as_strided_copy avg_pool2d avg_pool3d
        block_diag cat channel_shuffle clone col2im conj_physical cumsum deg2rad detach detach_copy
        diag_embed diagonal diagonal_backward diagonal_copy expand expand_copy flip im2col imag lift lift_fresh
        lift_fresh_copy mean neg permute permute_copy pixel_shuffle pixel_unshuffle positive rad2deg real
        reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d
        replication_pad3d roll rot90 select select_backward select_copy slice slice_backward slice_copy split
        split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack sum t t_copy trace transpose
        transpose_copy tril triu unbind unbind_copy unfold unfold_backward unfold_copy unsafe_chunk unsafe_split
        unsafe_split_with_sizes unsqueeze unsqueeze_copy upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d view view_as_complex
        view_as_complex_copy view_as_real view_as_real_copy view_copy _upsample_bilinear2d_aa
        _adaptive_avg_pool2d_backward avg_pool2d_backward upsample_nearest2d_backward
        upsample_bilinear2d_backward reflection_pad1d_backward replication_pad1d_backward narrow_copy
    """,
    "0+2": "constant_pad_nd",
    "0+1": "add as_strided_scatter diagonal_scatter rsub select_scatter slice_scatter sub",
    "0+1+0*2+1*2": "lerp",
    # products
    "0*1": """
        bmm dot embedding index linalg_cross masked_select matmul mm mul mv outer ger take vdot _unsafe_index
        embedding_dense_backward
    """,
    "0*2": "gather index_select",
    "0*1*2": "_trilinear",
    "0*1+2": "convolution linear",
    "0+1*2": "addbmm addcmul addmm addmv addr baddbmm",
    "0+1/2": "addcdiv",
    "0/1": """
        cholesky_solve div elu_backward gelu_backward glu_backward hardsigmoid_backward hardswish_backward
        hardtanh_backward hardshrink_backward leaky_relu_backward logit_backward mish_backward sigmoid_backward
        silu_backward softplus_backward softshrink_backward special_xlog1py tanh_backward threshold_backward xlogy
        _log_softmax_backward_data _softmax_backward_data
    """,
    "1/0": "linalg_solve_triangular",
    "0/1/2": """
        binary_cross_entropy_backward huber_loss_backward log_sigmoid_backward
        smooth_l1_loss_backward
    """,
    "0|1|2": "convolution_backward",
    "0|2|3|6": "nll_loss_backward",
    "0|1|3|4|5": "native_layer_norm_backward",
    "0|7": "max_pool2d_with_indices_backward",
    "0|2": "value_selecting_reduction_backward",
    "0|1|2|3|4": "native_group_norm_backward",
    # a part of one and a part of another
    "0*1+0*2": "mse_loss_backward where",
    "0*1+2*1": "_index_put_impl _unsafe_index_put index_put masked_fill masked_scatter put",
    "0*2+3*2": "index_copy index_fill scatter",
    "0+3*2": "index_add scatter_add",
    "1 -0": "copy fill",
    # not linear
    "!0": """
        _fused_rms_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training cudnn_batch_norm native_batch_norm native_group_norm
        native_layer_norm _linalg_det _linalg_eigh _linalg_slogdet _linalg_svd _log_softmax _prelu_kernel _softmax abs acos acosh
        adaptive_max_pool2d all amax amin aminmax angle any argmax argmin argsort asin asinh atan atanh
        bitwise_not ceil celu clamp clamp_max clamp_min cos cosh count_nonzero cummax cummin cumprod digamma elu
        erf erfc erfinv exp exp2 expm1 floor frac gelu glu hardshrink hardsigmoid hardswish hardtanh i0 isinf
        isnan isneginf isposinf kthvalue leaky_relu lgamma linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex
        linalg_matrix_exp linalg_qr linalg_vector_norm log log10 log1p log2 log_sigmoid_forward logcumsumexp
        logical_not logit logsumexp max max_pool2d_with_indices max_pool3d_with_indices median min mish mode
        mvlgamma nan_to_num nanmedian nansum nonzero norm polygamma prod reciprocal relu relu6 renorm round rsqrt
        selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sort special_bessel_j0
        special_bessel_j1 special_bessel_y0 special_entr special_erfcx special_i0e special_i1 special_i1e
        special_log_ndtr special_modified_bessel_i0 special_ndtri sqrt square std std_mean tan tanh threshold topk
        trunc where.default unique_consecutive var var_mean _unique2
    """,
    "!0 !1": """
        _cdist_forward atan2 binary_cross_entropy binary_cross_entropy_with_logits bitwise_and bitwise_or
        bitwise_xor bucketize copysign dist eq floor_divide fmax fmin fmod ge gt heaviside huber_loss hypot igamma
        igammac isclose le logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mse_loss ne
        max.other min.other div.Tensor_mode div.Scalar_mode pow remainder searchsorted smooth_l1_loss soft_margin_loss special_zeta
        _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    """,
    "!0 !1 !2": "clamp.Tensor clamp_max.Tensor clamp_min.Tensor",
    # shapes alone
    "=S": """
        arange bartlett_window blackman_window eye full full_like hamming_window hann_window linspace logspace
        new_full new_ones ones ones_like scalar_tensor tril_indices triu_indices
    """,
    "=Z": "_efficientzerotensor new_zeros zero zeros zeros_like",
    "=V": "empty empty_like empty_permuted empty_strided new_empty new_empty_strided",
    # random
    "~": """
        bernoulli binomial cauchy exponential geometric log_normal multinomial native_dropout normal
        normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm
        rrelu_with_noise uniform _sample_dirichlet _standard_gamma
    """,
    "": """
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale _embedding_bag _fused_adagrad _fused_adam
        _fused_adamw _fused_sgd _linalg_solve_ex _pdist_forward histc multi_margin_loss native_batch_norm_backward
        index_reduce scatter.reduce scatter.value_reduce scatter_reduce nextafter nll_loss2d_forward nll_loss_forward bincount _cdist_backward _fused_rms_norm_backward
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
    """,
}

TABLE = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
"""The rule of each operator, by its name in `torch.ops.aten`; that of an overload which is not as the others, by both."""


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
