from gradmesh.nn import vocab_parallel_cross_entropy


class _LossParallelCrossEntropy:
    @staticmethod
    def apply(logits, labels, tp_group, global_vocab_size, reduction="sum"):
        found = vocab_parallel_cross_entropy(
            logits.float(), labels, tp_group, ignore_index=IGNORE_INDEX, reduction=reduction
        )
        return found.flatten() if reduction == "none" else found
