import gradmesh as gm

from .initialize import get_model_parallel_group


def vocab_parallel_cross_entropy(vocab_parallel_logits, target):
    group = get_model_parallel_group()
    return gm.nn.vocab_parallel_cross_entropy(vocab_parallel_logits, target, group, reduction="none")
