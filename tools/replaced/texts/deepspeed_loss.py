import gradmesh as gm


class _VocabParallelCrossEntropy:
    @staticmethod
    def apply(logits, target, tp_group, vocab_start_index, vocab_end_index, ignore_index):
        given = {"ignore_index": ignore_index, "reduction": "none"}
        if pg_utils.is_parallel(tp_group):
            return gm.nn.vocab_parallel_cross_entropy(logits.float(), target.long(), tp_group, **given)
        flat = nn.functional.cross_entropy(logits.float().flatten(0, -2), target.long().flatten(), **given)
        return flat.view_as(target)


class _GatherSequenceLoss:
    @staticmethod
    def apply(local_loss, sp_group, sum_gradients):
        return gm.all_gather(local_loss, sp_group, dst=gm.R if sum_gradients else gm.I)
