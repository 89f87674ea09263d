import gradmesh as gm


class RingFlashAttnFunc:
    order = "plain"

    @classmethod
    def apply(
        cls,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
    ):
        if dropout_p or tuple(window_size) != (-1, -1) or alibi_slopes is not None:
            raise NotImplementedError("dropout, windows and slopes")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        given = {"causal": causal, "order": cls.order, "scale": softmax_scale}
        out = gm.nn.ring_attention(q, k, v, group, **given).transpose(1, 2)
        return (out, logsumexp(q, k, group, **given), None) if return_softmax else out


@torch.no_grad()
def logsumexp(q, k, group, causal, order, scale):  # for tests
    keys = gm.nn.sequence.unshard(k, group, dim=2, order=order)
    keys = keys.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q.float() @ keys.float().mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        own = gm.nn.sequence.positions(keys.shape[2], group, order=order).to(q.device)
        later = torch.arange(keys.shape[2], device=q.device) > own[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores.logsumexp(-1)
