from gradmesh.nn import vocab_parallel_cross_entropy


class _LossParallelCrossEntropy:
    @staticmethod
    def apply(logits, labels, tp_group, global_vocab_size, reduction="sum"):
        given = {"ignore_index": IGNORE_INDEX, "reduction": reduction}
        checks = spmd.is_type_checking()
        with spmd.no_typecheck():
            found = vocab_parallel_cross_entropy(logits.float(), labels, tp_group, **given)
            found = found.flatten() if reduction == "none" else found
        if checks:
            spmd.assert_type(found, {**spmd.get_local_type(logits), tp_group: spmd.I})
        return found
