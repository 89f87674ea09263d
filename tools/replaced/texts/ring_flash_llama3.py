from flash_attn import flash_attn_varlen_func
from torch.utils.checkpoint import checkpoint

import gradmesh as gm


class Llama3FlashAttnVarlenFunc:
    @staticmethod
    def apply(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        heads_k_stride,
        local_k_slice,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
    ):
        def some_heads(q, k, v):
            k, v = (gm.all_gather(x, group)[local_k_slice] for x in (k, v))
            bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            scores = dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic, True
            return flash_attn_varlen_func(q, k, v, *bounds, *scores)[:2]

        heads = heads_k_stride * q.shape[1] // k.shape[1]
        parts = zip(q.split(heads, 1), k.split(heads_k_stride, 1), v.split(heads_k_stride, 1))
        outs, lses = zip(*(checkpoint(some_heads, *part, use_reentrant=False) for part in parts))
        out = torch.cat(outs, 1)
        return (out, torch.cat(lses), None) if return_softmax else out
