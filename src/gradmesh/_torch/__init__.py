"""Every private name of torch that gradmesh uses, in one place.

Private names change between releases. Each is looked up here once, with the fallback if it is missing; a torch that
lacks some gives one warning that names them. `tests/test_torch_private.py` tests the behavior that gradmesh relies on,
so that a new torch release fails there, by name, and not in a training run.
"""

from gradmesh._torch.accumulation import (
    accumulates,
    after_pass,
    can_accumulate_later,
    can_run_after_pass,
    leaf_behind,
)
from gradmesh._torch.attention import flash_backward, flash_forward, flash_takes
from gradmesh._torch.compiled import (
    compiling,
    constant_to_compilers,
    default_group,
    enters_graphs,
    functional,
    hashed_by_identity,
    is_fake,
    keyword_fields_last,
    never_compiled,
    only_others_compile,
    ordered_effect,
    resolve_group,
)
from gradmesh._torch.dispatched import (
    DispatchMode,
    arguments_of,
    dispatched_name,
    group_behind,
    need_dispatch,
    version_of,
)
from gradmesh._torch.duplicate_groups import duplicate_group, is_known
from gradmesh._torch.fresh import fill_fresh_memory
from gradmesh._torch.fsdp import (
    flat_parameters,
    flattened,
    fully_sharded,
    ignored_by_fsdp,
    is_flattened,
    is_replicated,
)
from gradmesh._torch.inductor import keep_order_in_inductor
from gradmesh._torch.modes import (
    forward_level_open,
    functorch_active,
    in_plain_mode,
    is_legacy_batched,
    modes_active,
    on_legacy_batch,
    only_vmap_active,
    outside_modes,
    tracing,
    tracing_script,
    transforms_active,
    without_autograd,
)
from gradmesh._torch.names import RELIED_ON, warn_of_what_is_gone
from gradmesh._torch.passes import (
    LastPass,
    backward_pass,
    checkpoint_region,
    function_backward,
    function_forward,
    in_backward,
    in_reentrant_checkpoint,
    named_range,
    profiler_on,
    saves_for_a_checkpoint,
)
from gradmesh._torch.profiles import profiler_of_all_threads
from gradmesh._torch.rendezvous import join_through
from gradmesh._torch.threads import _RankWorld, adopt_thread, stand_in, thread_isolation

__all__ = [
    "RELIED_ON",
    "DispatchMode",
    "LastPass",
    "_RankWorld",
    "accumulates",
    "adopt_thread",
    "after_pass",
    "arguments_of",
    "backward_pass",
    "can_accumulate_later",
    "can_run_after_pass",
    "checkpoint_region",
    "compiling",
    "constant_to_compilers",
    "default_group",
    "dispatched_name",
    "duplicate_group",
    "enters_graphs",
    "fill_fresh_memory",
    "flash_backward",
    "flash_forward",
    "flash_takes",
    "flat_parameters",
    "flattened",
    "forward_level_open",
    "fully_sharded",
    "function_backward",
    "function_forward",
    "functional",
    "functorch_active",
    "group_behind",
    "hashed_by_identity",
    "ignored_by_fsdp",
    "in_backward",
    "in_plain_mode",
    "in_reentrant_checkpoint",
    "is_fake",
    "is_flattened",
    "is_known",
    "is_legacy_batched",
    "is_replicated",
    "join_through",
    "keep_order_in_inductor",
    "keyword_fields_last",
    "leaf_behind",
    "modes_active",
    "named_range",
    "need_dispatch",
    "never_compiled",
    "on_legacy_batch",
    "only_others_compile",
    "only_vmap_active",
    "ordered_effect",
    "outside_modes",
    "profiler_of_all_threads",
    "profiler_on",
    "resolve_group",
    "saves_for_a_checkpoint",
    "stand_in",
    "thread_isolation",
    "tracing",
    "tracing_script",
    "transforms_active",
    "version_of",
    "without_autograd",
]

warn_of_what_is_gone()
