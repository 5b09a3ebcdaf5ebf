"""Which tests the default run takes; all others get the marker `full`.

A test is in the default run unless a row says otherwise. The default run keeps one representative
of every model, mesh axis, schedule, context-parallel method, dispatcher, float8 recipe, recompute
mode, fault and command in the documents, and all planted bugs; tests/test_selection.py holds it to
that. Rows are the most expensive of what is left, and tests that need packages which the extra
`test` does not bring. test_parity.py chooses its cases itself, by the settings in them.
"""

import re

import pytest

FULL_FILES = (
    # need transformers or datasets, which the extra `test` does not bring
    "checkpoints/test_convert.py",
    "data/test_data_hf.py",
    "models/test_hf.py",
    "models/test_moe_references.py",
    "models/test_references.py",
    # start processes again and again
    "checkpoints/test_restarts.py",
    "faults/test_soak.py",
)
"""Files under tests/ of which no test is in the default run."""
NONE = ""
KEPT: dict[str, dict[str, str]] = {
    "bench/test_run.py": {
        "test_bench_of_a_sweep": NONE,
    },
    "checkpoints/test_security.py": {
        "test_a_safetensors_index_does_not_lead_out_of_its_folder": NONE,
        "test_pickles_of_a_hugging_face_folder_are_not_loaded": NONE,
    },
    "faults/test_elastic.py": {
        "test_ranks_leave_and_come_back": "1",
    },
    "faults/test_guards.py": {
        "test_the_step_of_a_spike_or_of_a_nan_is_not_taken": "^one|^emb",
    },
    "faults/test_launch.py": {
        "test_torchrun_exits_0_after_slurms_warning": NONE,
        "test_torchrun_exits_0_when_it_is_warned_before_training": NONE,
        "test_two_hosts_that_lose_each_other_go_on": NONE,
    },
    "float8/test_fused.py": {
        "test_compiled_blocks_share_one_graph_with_the_operators": NONE,
    },
    "float8/test_statistics.py": {
        "test_steps_that_report_name_every_layer": "settings0",
    },
    "models/test_decoder.py": {
        "test_blocks_compile_once_to_one_graph": "^gpt-override2|^deepseek_v3",
        "test_blocks_compile_with_grouped_products": "mixtral",
        "test_kinds_of_blocks_compile_once_each": NONE,
    },
    "models/test_rope.py": {
        "test_scaling_equals_hugging_face": NONE,
        "test_table_equals_hugging_face": NONE,
    },
    "models/test_router.py": {
        "test_recomputation_does_not_count_again": "False|selective",
    },
    "parallelisms/test_async_tp.py": {
        "test_compiled_blocks_share_one_graph_with_the_operators": NONE,
    },
    "parallelisms/test_collectives.py": {
        "test_activations_of_a_layer": "^gpt-True|^llama-False|^mix",
        "test_gradients_of_replicated_parameters_are_reduced_once": "^gpt-True|^llama-False",
        "test_logits_are_never_gathered": "^gpt|^deepseek",
    },
    "parallelisms/test_compile.py": {
        "test_depth_adds_no_graph": "^llama-2-(tp=2-seq|mode=selective-off)|^mixtral-2-ep=2-seq",
        "test_experts_on_other_ranks_break_their_blocks": "mixtral",
    },
    "parallelisms/test_deepep.py": {
        "test_equals_all_to_all": "2-shuffled",
        "test_models_train_alike": "^mixtral",
    },
    "parallelisms/test_deferred.py": {
        "test_experts_gradients_equal_a_plain_backward": "^-|^aot_eager-torch.float32",
        "test_inductor_keeps_what_is_queued": NONE,
        "test_compiling_what_was_not_deferred_for_it_is_refused": "aot_eager",
        "test_gradients_equal_a_plain_backward_on_ranks": (
            "^shards=2-(mode|collect|keep|each)|^tp=2$|^tp=2.*=True-mode|^replicas=2"
        ),
    },
    "parallelisms/test_expert.py": {
        "test_shared_experts_are_computed_while_rows_travel": "-ep=2-seq",
        "test_ranks_with_all_rows_and_with_none": "^qwen3_moe",
    },
    "parallelisms/test_float8_bytes.py": {
        "test_shared_scales_are_counted": "cp=2",
    },
    "parallelisms/test_float8_dispatch.py": {
        "test_compiled_layers_equal_eager_ones": "2",
        "test_equals_experts_that_cast_what_they_get": "-2-2",
        "test_models_equal_one_process_whose_experts_cast": "^deepseek_v3-2",
    },
    "parallelisms/test_journeys.py": {
        "test_ranks_are_those_of_a_mesh": NONE,
    },
    "parallelisms/test_offload.py": {
        "test_compiled_blocks": "(none|selective)-aot_eager",
    },
    "parallelisms/test_plugin.py": {
        "test_layout_equals_one_process": "^vit",
    },
    "parallelisms/test_recompute.py": {
        "test_experts_are_chosen_once_under_inductor": NONE,
    },
    "parallelisms/test_symmetric_dispatch.py": {
        "test_bounded_buffers_equal_one_process": "^mixtral",
        "test_compiled_blocks_equal_one_process": NONE,
        "test_compiled_blocks_in_bfloat16_equal_eager_ones": NONE,
        "test_calls_of_forwards_backwards_and_recomputation_take_turns": "(none|full)-.-eager",
        "test_compiled_blocks_compute_shared_experts_while_rows_travel": NONE,
        "test_equals_all_to_all": "2-1",
        "test_what_products_leave_open_is_read_by_nobody": "mixtral",
    },
    "plan/test_activations.py": {
        "test_bytes_that_a_compiled_block_keeps": "^gpt|^deepseek_v3-3-sel",
        "test_products_that_the_backward_computes_again": "eager|^llama",
        "test_what_waits_for_weight_gradients": "eager|^mixtral",
    },
    "plan/test_calibrate.py": {
        "test_two_hosts_of_two_ranks_are_measured": NONE,
    },
    "plan/test_communication.py": {
        "test_collectives_of_a_step": "^gpt|^mixtral|-cp=2.*selective",
    },
    "plan/test_exact.py": {
        "test_a_backward_in_two_parts_holds_what_weight_gradients_need": "dense",
        "test_what_is_kept_between_micro_batches_is_in_the_peak": "zero",
        "test_plans_are_what_the_code_does": "^(ZBV|experts|sharded|pulled)",
    },
    "plan/test_legality.py": {
        "test_a_plan_says_that_deepep_was_not_looked_for": NONE,
        "test_deepep_over_several_hosts_is_refused": NONE,
    },
    "plan/test_memory.py": {
        "test_model_state_of_real_ranks": "^qwen3|^deepseek_v3-4-dp",
    },
    "plan/test_search.py": {
        "test_a_reader_that_goes_ends_it_quietly": "how0",
        "test_no_layout_needs_less_than_its_least_bytes": "^-8|-16$",
    },
    "test_loss.py": {
        "test_no_such_tensor_in_a_step": "alone|pp",
    },
    "test_routing.py": {
        "test_a_mixture_walks_through_all_layouts": NONE,
        "test_checkpoint_loads_under_other_experts": "^1-",
        "test_every_layout_moves_the_biases_of_one_process": "^2-(pp|tp)=2",
    },
    "test_steptimes.py": {
        "test_a_graph_from_the_cache_is_counted_once": NONE,
    },
    "test_trainer.py": {
        "test_checkpoints_walk_through_all_layouts": NONE,
        "test_copy_engines_take_the_place_of_collectives": "llama",
        "test_every_layout_logs_the_losses_of_one_process": (
            "^2-$|^2-pp=2|^2-loss|^4-(cp=4|tp=2|dp_replicate=4)"
        ),
        "test_rows_that_do_not_fit_stop_the_run": "layout0",
    },
}
"""Of these test functions of a file the default run keeps what a pattern matches in the parameters'
ids, or nothing."""

ONLY_BY_NAME = ("gpu", "matrix", "soak")
"""Markers of tests that run only where -m names the marker."""
COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that pytest found, selected or not."""


def in_default_run(nodeid: str) -> bool:
    """Whether a test is in the default run, by its node id from the root of the repository."""
    file, _, rest = nodeid.removeprefix("tests/").partition("::")
    function, _, ids = rest.partition("[")
    kept = KEPT.get(file, {}).get(function)
    if kept is None:
        return file not in FULL_FILES
    return kept != NONE and re.search(kept, ids.removesuffix("]")) is not None


def only_by_name(item: pytest.Item) -> set[str]:
    """The markers of ONLY_BY_NAME that a test has."""
    return {marker for marker in ONLY_BY_NAME if item.get_closest_marker(marker)}
