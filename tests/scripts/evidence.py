"""What shows that a script is wrong, or right, without any types: differences, its twin, and the ranks' values."""

from __future__ import annotations

import math
import re
from itertools import combinations, pairwise

import torch
from torch import Tensor

from tests.scripts import SCRIPTS, Script
from tests.scripts.running import Derivative, Played, derivatives, play

__all__ = ["UNDIFFERENTIATED", "common_factor", "shown"]

UNDIFFERENTIATED = {
    "autocast_bf16": "differences drown in bfloat16",
    "sgd_by_hand": "steps without an optimizer",
    "codebook_summed": "a gradient that is straight through by intention",
    "ddp_two_heads": "an advantage that is detached by intention",
    "moco": "keys that are detached by intention",
    "deliberate_gradients": "gradients that are no derivatives by intention",
    "scaled_clipped_noised": "gradients that are clipped by value, and noise",
    "gradient_surgery": "gradients that are projected by intention",
    "last_layer_held_still": "gradients that are taken away by intention",
    "peer_predictions": "predictions that are data by intention",
    "weighted_by_rows": "the sum of losses that are weighted by rows",
    "zero1_by_hand": "optimizers of other parameters on each rank",
    "flat_master_shards": "an optimizer of copies",
    "float32_masters": "an optimizer of copies, and bfloat16",
    "fsdp1": "parameters that are views of a flat one",
    "fsdp1_small_shards": "parameters that are views of a flat one, and its clip_grad_norm_ takes no float64",
    "sparse_embedding": "sparse gradients",
    "torch_pipelining": "micro-batches whose losses another rank computes",
    "closed_form_gradients": "gradients without a backward",
    "averaged_after_each_step": "gradients of each rank's own loss, and parameters that are averaged",
    "local_steps_averaged": "gradients of each rank's own loss, and parameters that are averaged",
    "heads_of_own_sizes": "a trunk whose gradients are averaged, beside heads that each rank has for itself",
    "server_broadcasts_after_its_step": "a rank that alone steps, and sends afterwards",
    "pipeline_packed_messages": "stages with other parameters on each rank",
    "own_numbers_of_micro_batches": "sums that are divided by the number of rows behind backward",
    "penalty_added_after_average": "gradients to which a multiple of the weights is added",
    "sharpness_of_each_rank": "gradients at weights that each rank displaces on its own",
    "variance_reduced": "gradients at two weights, one minus the other",
    "fsdp1_partly_frozen": "parameters that are views of a flat one",
    "gradients_averaged_in_a_step_hook": "gradients that a hook of the optimizer averages, behind what is seen of them",
    "rates_tried_in_parallel": "ranks that train each a model of its own",
    "loader_with_workers": "a loop over batches of workers",
    "evolution_strategy": "steps without any gradient",
    "summed_and_assigned_in_turn": "steps without an optimizer",
    "local_steps_of_masters": "an optimizer of copies, and bfloat16",
    "functional_sgd": "steps without an optimizer",
    "norm_of_heads": "sharded parameters that have no names",
    "tokens_counted_once": "sharded parameters that have no names",
    "tower_with_copy": "shards that two ranks have each",
    "norm_of_a_tied_table": "stages with other parameters on each rank",
    "private_gradients": "gradients by torch.func, clipped by sample",
    "policy_micro_batches": "a ratio to a detached copy of itself, whose value is one",
    "gradients_of_the_step_before": "gradients of an earlier loss by intention",
    "generator_on_another_rank": "models of other parameters on each rank",
    "hook_that_codes_later": "gradients that are rounded by intention",
    "copy_adapted_by_each_rank": "gradients of copies that each rank adapts by itself",
}
"""Scripts whose gradients cannot be held against differences, and why."""

UNLIKE_TWIN = {
    "teacher_of_each_rank",
    "norm_counts_copies",
    "step_on_rank_0_alone",
    "server_broadcasts_before_its_step",
    "decay_by_rank_fsdp2",
    "weights_summed_and_assigned",
    "functional_weights_not_summed",
    "owners_compute_of_their_own",
    "megatron_sink_outside_of_the_norm",
    "megatron_tied_embedding_in_the_norm",
}
"""Scripts whose parameters and gradients show nothing by themselves, but end elsewhere than their twin's."""

HANGS = {"GM401", "GM402"}


def common_factor(found: list[Derivative]) -> float | None:
    """What all gradients are times the true ones; None if they are not the same multiple of them.

    A direction along which the losses do not change says nothing.
    """
    factors = [factor for one in found if abs(one.true) > 1e-6 for factor in one.factors]
    if not factors or any(math.isnan(factor) for factor in factors):
        return None
    return factors[0] if all(abs(factor / factors[0] - 1) < 1e-3 for factor in factors) else None


def alike(tensors: list[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairwise(tensors))


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of weights are the same up to rounding; weights of other shapes say nothing either way."""
    return all(torch.allclose(x, y, 1e-3, 1e-5) for x, y in zip(a, b, strict=True) if x.shape == y.shape)


def depends_on_when_sums_end(script: Script) -> bool:
    """Whether the weights differ between sums that end as they start and sums that end in `wait()`."""
    at_once, late = (play(script, sums=when).ranks[0].weights[-1] for when in ("at once", "late"))
    return not close(at_once, late)


def each(played: Played, which: str, step: int) -> list[list[Tensor]]:
    """The parameters, or their gradients, of a step: for each of them those of all ranks."""
    of_ranks = [getattr(seen, which)[step] for seen in played.ranks]
    return [list(tensors) for tensors in zip(*of_ranks, strict=True)]


def same_masks(played: Played) -> bool:
    """Whether dropout drew the same on all ranks wherever that can be seen: where what it was given is not zero."""
    for masks in zip(*(seen.masks for seen in played.ranks), strict=True):
        first = masks[0]
        if any(m.shape != first.shape or bool(((m >= 0) & (first >= 0) & (m != first)).any()) for m in masks):
            return False
    return bool(played.ranks[0].masks)


def ratio_to_twin(script: Script, played: Played) -> float | None:
    """The factor between a script's first gradients and those of its twin, if there is one."""
    assert script.twin is not None
    there = play(SCRIPTS[script.twin]).ranks[0].gradients[0]
    ratios = []
    for mine, other in zip(played.ranks[0].gradients[0], there, strict=True):
        assert mine is not None
        assert other is not None
        ratio = float((mine * other).sum() / (other * other).sum())
        if not torch.allclose(mine, ratio * other, rtol=1e-3, atol=1e-6):
            return None
        ratios.append(ratio)
    return ratios[0] if max(ratios) - min(ratios) < 1e-3 else None


def apart(played: Played) -> bool:
    """Whether a parameter that is the same on the ranks at first gets gradients at some step that are not."""
    values = each(played, "before", 0)
    for step in range(len(played.ranks[0].gradients)):
        for held, gradients in zip(values, each(played, "gradients", step), strict=True):
            for a, b in combinations(range(len(held)), 2):
                there = gradients[a] is not None and gradients[b] is not None
                if there and alike([held[a], held[b]]) and not alike([gradients[a], gradients[b]]):
                    return True
    return False


def drift(played: Played) -> bool:
    """Whether parameters are the same on the ranks before the first step, and not behind the last one."""
    shapes = [[[x.shape for x in values] for values in seen.before[:1]] for seen in played.ranks]
    of_all = bool(played.ranks[0].after) and all(own == shapes[0] for own in shapes)
    first, last = ("before", "after") if of_all else ("weights", "weights")
    step = min(len(getattr(seen, last)) for seen in played.ranks) - 1
    return all(map(alike, each(played, first, 0))) and not all(map(alike, each(played, last, step)))


def shown(script: Script) -> str | None:
    """What was seen of a script that is expected of it; None if its fault, or that it is right, was not seen."""
    rule = script.expected
    played = play(script)
    failed = any(seen.error for seen in played.ranks)
    if rule in HANGS:
        return "hangs" if played.hung else "fails" if failed else None
    if rule == "GM501":
        return "a rank raises" if failed and not played.hung else None
    if failed or played.hung:
        return None
    if rule in ("GM110", "GM111", "GM207", "GM208", "GM209", "GM304") or script.name in UNLIKE_TWIN:
        assert script.twin is not None
        other = play(SCRIPTS[script.twin])
        pairs = zip(played.ranks, other.ranks, strict=True)
        equal = all(close(one.weights[-1], its.weights[-1]) for one, its in pairs)
        return None if equal else "not the twin's weights"
    if rule == "GM101":
        return "gradients differ where parameters do not" if apart(played) else None
    if rule == "GM108":
        assert script.twin is not None
        losses = [p.ranks[0].losses[0] for p in (played, play(SCRIPTS[script.twin]))]
        return "another value than the twin's" if abs(losses[0] - losses[1]) > 1e-3 else None
    if rule == "GM112":
        assert script.twin is not None
        printed = [p.ranks[0].printed.splitlines()[0] for p in (played, play(SCRIPTS[script.twin]))]
        numbers = [[float(text) for text in re.findall(r"-?\d+\.?\d*", line)] for line in printed]
        ratios = {round(a / b, 3) for a, b in zip(*numbers, strict=True) if a != b}
        return f"prints {script.ranks} times the twin's" if ratios == {script.ranks} else None
    if rule == "GM109":
        ratio = ratio_to_twin(script, played)
        return (
            f"{ratio:.3g} of the twin's gradients" if ratio and abs(ratio * script.ranks - 1) < 1e-3 else None
        )
    if rule in ("GM201", "GM206"):
        return "parameters part" if drift(played) else None
    if rule == "GM202":
        differ = any(not all(map(alike, each(played, which, 0))) for which in ("before", "weights"))
        return "parameters differ from the start" if differ else None
    if rule == "GM203":
        differ = any(
            not alike([seen.buffers[key] for seen in played.ranks]) for key in played.ranks[0].buffers
        )
        return "buffers differ" if differ else None
    if rule == "GM301":
        assert script.twin is not None
        inputs = [[seen.first_input for seen in p.ranks] for p in (played, play(SCRIPTS[script.twin]))]
        known = [[x for x in xs if x is not None] for xs in inputs]
        same = [any(alike(list(pair)) for pair in combinations(xs, 2)) for xs in known]
        return "the same input" if same == [True, False] else None
    if rule == "GM403":
        assert script.twin is not None
        wrong, right = (depends_on_when_sums_end(one) for one in (script, SCRIPTS[script.twin]))
        return "weights that depend on when the sums end" if wrong and not right else None
    if rule == "GM303":
        return "the same masks" if same_masks(played) else None
    if rule is None and script.name in UNDIFFERENTIATED:
        return "runs"
    factor = common_factor(derivatives(script))
    fits = factor is not None and any(abs(factor * k - 1) < 1e-3 for k in range(1, script.ranks + 1))
    if rule is not None:
        return (
            None
            if fits
            else "gradients are no multiple of the truth"
            if factor is None
            else f"{factor:.4g} of it"
        )
    clipped = factor is not None and "clip" in script.path.read_text()
    return f"all gradients {factor:.4g} of the truth" if fits or clipped else None
