"""Every private name of torch that gradmesh uses, in one place.

Private names change between releases. Each is looked up here once, and registered with the consequence if it is missing
(`names`); a torch that lacks some gives one warning that names them. `tests/test_torch_private.py` tests the behavior
that gradmesh relies on, so that a new torch release fails there, by name, and not in a training run.
"""

from gradmesh._torch.compilers import (
    READS_NUMBERS,
    compiling,
    constant_to_compilers,
    default_group,
    enters_graphs,
    functional,
    is_fake,
    keep_order_in_inductor,
    keyword_fields_last,
    never_compiled,
    only_others_compile,
    ordered_effect,
    resolve_group,
)
from gradmesh._torch.groups import abort_group, default_store, duplicate_group, is_known, join_through
from gradmesh._torch.modes import (
    dispatch_modes,
    forward_level,
    forward_level_open,
    function_modes,
    functorch_active,
    in_plain_mode,
    is_legacy_batched,
    modes_active,
    on_legacy_batch,
    only_vmap_active,
    outside_modes,
    script_state,
    to_list,
    tracing,
    transforms_active,
    unwrap_if_dead,
    without_autograd,
)
from gradmesh._torch.names import RELIED_ON, warn_of_what_is_gone
from gradmesh._torch.operators import (
    DispatchMode,
    arguments_of,
    dispatched_name,
    fill_fresh_memory,
    fused_attention,
    group_behind,
    need_dispatch,
    profiler_of_all_threads,
    version_of,
)
from gradmesh._torch.passes import (
    LastPass,
    accumulates,
    after_pass,
    backward_pass,
    can_accumulate_later,
    can_run_after_pass,
    checkpoint_region,
    function_backward,
    function_forward,
    in_backward,
    in_reentrant_checkpoint,
    leaf_behind,
    named_range,
    profiler_on,
    recompute_in,
    saves_for_a_checkpoint,
)
from gradmesh._torch.threads import _RankWorld, adopt_thread, stand_in, thread_isolation

warn_of_what_is_gone()
