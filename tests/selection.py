"""Which tests the default run takes; all others get the marker `full` or `matrix`.

A test is in the default run unless a row says otherwise. The default run keeps one representative
of every model, mesh axis, schedule, context-parallel method, dispatcher, float8 recipe, recompute
mode, fault, planted bug and command in the documents; tests/test_selection.py holds it to that.
Rows are the most expensive of what is left, and tests that need packages which the extra
`test` does not bring. test_parity.py chooses its cases itself, by the settings in them.
"""

import re

import pytest

FULL_FILES = (
    # need transformers, datasets or moto, which the extra `test` does not bring
    "checkpoints/test_convert.py",
    "checkpoints/test_stores.py",
    "data/corpus/test_data_hf.py",
    "data/corpus/test_data_s3.py",
    "faults/test_clusters.py",  # skypilot, kubernetes-validate
    "huggingface/test_huggingface.py",
    "inference/test_harness.py",  # lm-eval
    "inference/test_serve_check.py",
    "models/test_hf.py",
    "models/test_moe_references.py",
    "models/test_references.py",
    # random layouts
    "parallelisms/test_fuzz.py",
    # as test_parity.py and test_planted_bugs.py, of bugs of other frameworks
    "parallelisms/test_reported_bugs.py",
    "parallelisms/test_reference.py",
    # start processes again and again
    "test_examples.py",
    "checkpoints/test_restarts.py",
)
"""Files under tests/ of which no test is in the default run."""
NONE = "(?!)"  # matches nothing
KEPT: dict[str, dict[str, str]] = {
    "bench/test_bare.py": {
        "test_it_trains": "none",
    },
    "bench/test_baseline.py": {
        "test_a_run_is_compared_with_its_baseline": NONE,
    },
    "bench/test_frameworks.py": {
        "test_a_pair_is_run_and_compared": NONE,
    },
    "bench/test_run.py": {
        "test_a_failed_run_keeps_its_log_and_says_why": NONE,
        "test_bench_of_a_sweep": NONE,
    },
    "checkpoints/test_saving.py": {
        "test_an_update_waits_for_the_copy_of_what_it_changes": NONE,
        "test_a_full_disk_is_reported_and_training_goes_on": NONE,
        "test_a_full_disk_stops_the_run_and_leaves_older_checkpoints": "^sync",
        "test_one_copy_of_replicated_data_is_written": NONE,
        "test_room_for_copies_is_made_beside_training": "changes0",
        "test_the_plan_is_made_once": NONE,
        "test_retention_by_count_and_by_every_n": NONE,
        "test_a_save_waits_for_the_one_before": NONE,
        "test_saves_beside_training_hold_the_same_bits": NONE,
    },
    "checkpoints/test_security.py": {
        "test_a_safetensors_index_does_not_lead_out_of_its_folder": NONE,
        "test_pickles_of_a_hugging_face_folder_are_not_loaded": NONE,
    },
    "checkpoints/test_locations.py": {
        "test_a_restarted_attempt_goes_on_from_what_the_job_has_written": NONE,
        "test_a_fast_tier_before_a_durable_one": NONE,
        "test_a_process_or_a_disk_that_fails_costs_one_checkpoint": "die",
        "test_a_run_that_dies_while_its_last_checkpoint_is_copied": NONE,
        "test_checkpoints_in_a_store": NONE,
        "test_a_finished_run_with_tiers_is_copied_once": NONE,
        "test_a_disk_that_does_not_answer_ends_a_synchronous_save_too": NONE,
    },
    "data/corpus/test_data_chat.py": {  # transformers is not in the extra `test`
        "test_tokens_and_masks_are_those_of_transformers": NONE,
        "test_tables_hold_the_same_chats": NONE,
        "test_packed_chats_equal_unpacked_ones": "two ranks",
        "test_steps_without_a_label_have_no_loss": NONE,
    },
    "data/test_data_training.py": {
        "test_a_run_of_whole_documents_resumes_under_another_layout": NONE,
        "test_ranks_do_not_change_a_run": "best_fit",
    },
    "lora/test_lora_files.py": {  # transformers and peft are not in the extra `test`
        "test_peft_and_the_merged_export_give_equal_logits": NONE,
        "test_peft_computes_the_same_dora": NONE,
        "test_magnitudes_start_as_norms_and_are_resumed_to_the_bit": NONE,
    },
    "lora/test_lora_layouts.py": {
        "test_layouts_equal_one_process": (
            r"-2-(tp|cp|ep|etp|pp)(?!.*(dora|async))|gpt-2-tp=2-async"
        ),
    },
    "inference/test_inference.py": {
        "test_layouts_give_the_same": "tp=2",
        "test_scores_are_those_of_the_module_in_every_layout": "tp=2",
        "test_images_of_a_prompt_are_read": "tp=2",
    },
    "training/test_adamw8bit.py": {
        "test_layouts_train_alike_and_resume_in_others": NONE,
    },
    "training/test_custom_optimizer.py": {
        "test_torchs_adamw_trains_as_dtrons_in_layouts_and_after_a_resume": "tp",
    },
    "training/test_offloaded.py": {
        "test_layouts_train_alike_and_resume_with_and_without_offload": NONE,
    },
    "training/test_average.py": {
        "test_layouts_have_the_same_average_and_a_resume_keeps_it": "tp",
    },
    "checkpoints/test_best.py": {
        "test_the_best_checkpoint_is_kept_and_training_stops_early": "async",
    },
    "run/test_start.py": {
        "test_a_second_start_compiles_nothing": NONE,
    },
    "run/test_trackers.py": {  # wandb and mlflow are not in the extra `test`
        "test_weights_and_biases_offline": NONE,
        "test_mlflow_continues_its_run": NONE,
    },
    "run/test_attempts.py": {
        "test_a_killed_rank_is_named_and_a_run_without_progress_ends": NONE,
    },
    "faults/test_elastic.py": {
        "test_ranks_leave_and_come_back": "1",
    },
    "faults/test_entry.py": {
        "test_survivors_of_a_kill_end_as_soon_as_torchrun_stops_them": NONE,
        "test_torchruns_own_report_names_the_error": NONE,
        "test_a_port_in_use_is_one_line_under_torchrun": NONE,
        "test_a_port_in_use_is_one_line_without_torchrun": NONE,
        "test_a_signal_before_training_is_one_line": NONE,
        "test_an_error_of_a_config_is_one_message_under_torchrun": NONE,
    },
    "faults/test_guards.py": {
        "test_the_step_of_a_spike_or_of_a_nan_is_not_taken": "^one process-fit_poisoned",
    },
    "faults/test_hangs.py": {
        "test_a_rank_that_stops_at_the_start_is_named": "process group-0",
    },
    "faults/test_launch.py": {
        "test_a_job_is_queued_again": "node failure|time limit",
        "test_ranks_whose_torchrun_was_killed_do_not_end_the_run_elsewhere": NONE,
        "test_ranks_save_and_end_when_torchrun_is_killed": NONE,
        "test_host_py_stops_with_a_checkpoint": NONE,
        "test_torchrun_exits_0_after_slurms_warning": NONE,
        "test_torchrun_exits_0_when_it_is_warned_before_training": NONE,
    },
    "faults/test_memory.py": {
        "test_out_of_memory_is_one_message_of_all_ranks": NONE,
    },
    "float8/test_checkpoints.py": {
        "test_resumed_runs_go_on_with_their_delayed_scales": NONE,
        "test_resumed_runs_go_on_to_the_bit_with_float8_and_without": NONE,
    },
    "float8/test_gated.py": {
        "test_gives_what_three_layers_give": "False",
    },
    "float8/test_statistics.py": {
        "test_steps_that_report_name_every_layer": NONE,
    },
    "float8/test_weight_gradient.py": {
        "test_equal_calls_both_count": "^$",
        "test_experts_are_equal": "^$",
        "test_inductor_keeps_what_is_queued": NONE,
        "test_split_backwards_equal_whole_ones": "^-",
    },
    "kernels/test_peer_gather.py": {
        "test_kernel_equals_formula_in_the_interpreter": NONE,
    },
    "kernels/test_permute.py": {
        "test_kernels_equal_formulas_in_the_interpreter": NONE,
    },
    "kernels/test_float8_rows.py": {
        "test_kernels_equal_formulas_in_the_interpreter": NONE,
    },
    "models/test_custom.py": {
        "test_the_template_trains_in_layouts_as_in_one_process": "^(tp|pp)$",
    },
    "models/test_decoder.py": {
        "test_blocks_compile_once_to_one_graph": "^gpt-override2",
        "test_blocks_compile_with_grouped_products": NONE,
        "test_kinds_of_blocks_compile_once_each": NONE,
    },
    "models/test_rope.py": {
        "test_logits_equal_hugging_face": NONE,
        "test_scaling_equals_hugging_face": NONE,
        "test_table_equals_hugging_face": NONE,
    },
    "models/test_encoder_decoder.py": {  # need transformers
        "test_logits_gradients_and_files_equal_those_of_transformers": NONE,
        "test_text_equals_that_of_transformers": NONE,
    },
    "models/test_vision.py": {  # need transformers
        "test_logits_gradients_and_files_equal_those_of_transformers": NONE,
        "test_the_encoder_is_siglips": NONE,
    },
    "models/test_router.py": {
        "test_recomputation_does_not_count_again": "False",
    },
    "parallelisms/tensor/test_async_tp.py": {
        "test_compiled_blocks_share_one_graph_with_the_operators": NONE,
    },
    "parallelisms/test_bfloat16.py": {
        "test_a_layout_is_as_exact_as_one_process": "^2-llama-tp 2$",
    },
    "parallelisms/test_collectives.py": {
        "test_activations_of_a_layer": NONE,
        "test_chunks_of_the_loss_share_one_gather_and_one_reduction": NONE,
        "test_gradients_of_replicated_parameters_are_reduced_once": NONE,
        "test_logits_are_never_gathered": "^gpt$",
    },
    "parallelisms/test_compile.py": {
        "test_depth_adds_no_graph": NONE,
        "test_experts_on_other_ranks_break_their_blocks": NONE,
    },
    "parallelisms/expert/test_deepep.py": {
        "test_dispatchers_refuse_what_preflight_does": NONE,
        "test_a_buffer_grows": NONE,
        "test_equals_all_to_all": "2-shuffled",
        "test_models_train_alike": NONE,
    },
    "parallelisms/pipeline/test_split_backward.py": {
        "test_blocks_share_one_graph": NONE,
        "test_compiling_what_was_not_deferred_for_it_is_refused": "aot_eager",
        "test_experts_gradients_equal_a_plain_backward": "^-",
        "test_gradients_equal_a_plain_backward": "^plain$|^mode=full$",
        "test_gradients_equal_a_plain_backward_on_ranks": "^tp=2$|^replicas=2-shards=2-micro",
        "test_inductor_keeps_what_is_queued": NONE,
        "test_micro_batches_are_summed_in_the_dtype_of_reduction": NONE,
    },
    "parallelisms/pipeline/test_split_backward_experts.py": {
        "test_split_backwards_equal_whole_ones": NONE,
    },
    "parallelisms/pipeline/test_executed.py": {
        "test_bubble_of_what_eight_ranks_execute": "^1F1B",
    },
    "parallelisms/expert/test_expert_parallel.py": {
        "test_a_layer_waits_once_and_sends_rows_both_ways": NONE,
        "test_experts_are_split_by_their_own_axes": NONE,
        "test_ranks_with_all_rows_and_with_none": NONE,
        "test_shared_experts_are_computed_while_rows_travel": NONE,
        "test_symmetric_memory_waits_for_nothing": NONE,
        "test_recomputation_waits_and_sends_again": NONE,
    },
    "parallelisms/test_float8_bytes.py": {
        "test_weights_travel_as_one_byte_an_element": "tensorwise",
        "test_shared_scales_are_counted": NONE,
        "test_inputs_travel_as_one_byte_an_element": NONE,
    },
    "parallelisms/expert/test_float8_dispatch.py": {
        "test_bytes_in_shared_memory": NONE,
        "test_bytes_of_all_to_alls": NONE,
        "test_compiled_layers_equal_eager_ones": NONE,
        "test_beside_a_recipe_and_experts_in_float8": NONE,
        "test_dispatchers_by_hand_refuse_too": NONE,
        "test_equals_experts_that_cast_what_they_get": NONE,
        "test_losses_and_gradients_are_near_those_without": NONE,
        "test_models_equal_one_process_whose_experts_cast": "^deepseek_v3-2-ep=2-dispatch=True",
        "test_what_is_not_finite_stays_so": NONE,
    },
    "parallelisms/draw/test_dispatch.py": {
        "test_token_copies_are_those_that_experts_receive": NONE,
        "test_ranks_are_those_of_a_mesh": NONE,
    },
    "parallelisms/test_large.py": {
        "test_what_the_sources_say_is_refused": "^ep-|^pp_layout",
        "test_ranks_of_deepseek_v3_on_1024": NONE,
        "test_sixteen_pipeline_ranks_hold_the_model": NONE,
    },
    "parallelisms/test_offload.py": {
        "test_gathered_parameters_are_neither_copied_nor_held": "attention-units0",
        "test_compiled_blocks": NONE,
        "test_gradients_are_bitwise_equal": "^F0 B0",
    },
    "parallelisms/test_parity_gpu.py": {
        "test_the_same_code_on_cpus": NONE,
    },
    "parallelisms/expert/test_peer_memory.py": {
        "test_exchanges_wait_for_the_late": "0",
        "test_gathers_wait_for_the_late": "0",
    },
    "parallelisms/test_plugin.py": {
        "test_gradients_are_complete_after_each_backward": "False",
        "test_layout_equals_one_process": "^vit-4r-tp2-pp1-step",
    },
    "parallelisms/test_plugin_pages.py": {
        "test_the_code_of_the_pages_trains": NONE,
    },
    "parallelisms/test_recompute.py": {
        "test_experts_are_chosen_once_under_inductor": NONE,
        "test_what_runs_again": "^(?!compiled)",
    },
    "parallelisms/fsdp/test_custom_collectives.py": {
        "test_gradients_of_tensor_parallel_ranks_are_those_of_fsdp": NONE,
    },
    "parallelisms/expert/test_symmetric_dispatch.py": {
        "test_a_mailbox_needs_two_halves": NONE,
        "test_bounded_buffers_equal_one_process": NONE,
        "test_calls_of_forwards_backwards_and_recomputation_take_turns": NONE,
        "test_compiled_blocks_equal_one_process": NONE,
        "test_compiled_blocks_in_bfloat16_equal_eager_ones": NONE,
        "test_equals_all_to_all": "2-1",
        "test_experts_that_leave_rows_out_are_refused": NONE,
        "test_lost_rows_are_nan_and_reported": NONE,
        "test_ranks_of_several_hosts_are_refused": NONE,
        "test_ranks_wait_for_the_late": NONE,
        "test_room_that_is_always_there_is_no_capacity": NONE,
        "test_the_first_layer_that_lacks_rows_is_named": NONE,
        "test_what_models_of_ones_own_do": NONE,
        "test_what_products_leave_open_is_read_by_nobody": NONE,
        "test_different_numbers_of_rows_are_reported": NONE,
    },
    "plan/test_activations.py": {
        "test_what_waits_for_weight_gradients_of_float8": NONE,
        "test_bytes_that_a_compiled_block_keeps": "^gpt",
        "test_bytes_that_a_block_keeps_whose_modules_recompute": "^llama-0-full-modules2",
        "test_products_that_modules_compute_again": "^llama-0-modules0-eager",
        "test_bytes_that_a_compiled_float8_block_keeps": "^llama-0-(tensor|row)wise-$",
        "test_products_that_the_backward_computes_again": "eager",
        "test_what_waits_for_weight_gradients": "eager",
    },
    "plan/test_calibrate.py": {
        "test_two_hosts_of_two_ranks_are_measured": NONE,
    },
    "plan/test_communication.py": {
        "test_collectives_of_a_step": "^gpt",
    },
    "plan/test_exact.py": {
        "test_a_backward_in_two_parts_holds_what_weight_gradients_need": NONE,
        "test_plans_are_what_the_code_does": NONE,
        "test_rows_come_to_all_ranks_that_share_an_expert": NONE,
        "test_what_is_kept_between_micro_batches_is_in_the_peak": "zero 3",
    },
    "plan/test_feasibility.py": {
        "test_experts_split_as_tp_are_refused_with_what_fits": NONE,
        "test_a_plan_says_that_deepep_was_not_looked_for": NONE,
        "test_deepep_over_several_hosts_is_refused": NONE,
        "test_degrees": "llama3_70b",
        "test_experts_memory_over_several_hosts_is_refused": NONE,
        "test_gpt3_on_1024": NONE,
    },
    "plan/test_memory.py": {
        "test_model_state_of_real_ranks": "^qwen3",
    },
    "plan/test_plan_layouts.py": {
        "test_a_measurement_that_is_broken_off_leaves_no_process": NONE,
        "test_a_row_that_takes_too_long_says_so": NONE,
    },
    "plan/test_search.py": {
        "test_large_numbers_are_written_out": NONE,
        "test_etp_is_looked_at_with_experts_and_float8_where_one_asks": NONE,
        "test_offload_is_looked_at_where_nothing_else_fits": NONE,
        "test_a_reader_that_goes_ends_it_quietly": NONE,
        "test_memory_is_replayed_of_the_fastest_alone": NONE,
        "test_no_layout_needs_less_than_its_least_bytes": "^-8",
        "test_no_rank_takes_less_than_its_bound": "sgd-8",
        "test_nothing_found_depends_on_the_number_of_processes": NONE,
    },
    "models/test_contract.py": {
        "test_a_family_trains_in_layouts_as_in_one_process": "tp 2 x pp 2",
    },
    "run/test_lock.py": {
        "test_the_lock_is_shared_through_the_store_of_a_rendezvous": NONE,
        "test_ranks_share_the_lock_of_their_first": NONE,
    },
    "data/corpus/test_data_documents.py": {  # pyarrow and zstandard are not in the extra `test`
        "test_a_file_that_cannot_be_opened_has_no_line": "^(?!.parquet)",
        "test_a_text_file_is_one_document": "^(?!.*zst)",
        "test_json_lines": "^(?!.*zst)",
        "test_parquet": NONE,
    },
    "data/corpus/test_data_urls.py": {"test_parquet_is_read_from_urls": NONE},
    "data/corpus/test_data_executors.py": {  # datatrove and ray are not either
        "test_arguments_of_an_executor_are_checked": NONE,
        "test_a_ray_cluster_writes_what_one_machine_does": NONE,
    },
    "data/corpus/test_data_cache.py": {
        "test_a_signal_while_tokenizing_leaves_no_files": "15",
    },
    "bench/test_kernels.py": {
        "test_an_update_is_one_part_of_float32_parameters": NONE,
        "test_the_whole_command_on_a_cpu": NONE,
    },
    "kernels/test_float8_kernels.py": {
        "test_kernels_equal_formulas_in_the_interpreter": NONE,
    },
    "test_documentation.py": {
        "test_the_configuration_page_has_every_key": NONE,
        "test_links_between_pages_of_the_repository_and_of_the_site": NONE,
    },
    "test_hostile.py": {
        "test_hostile_cases_end_in_an_error_that_names_them": NONE,
    },
    "test_gpu_ranks.py": {
        "test_hangs_show_the_stack_and_do_not_last": NONE,
    },
    "test_notebook.py": {
        "test_the_notebook_of_the_plug_in_runs": NONE,
    },
    "training/test_loss.py": {
        "test_no_such_tensor_in_a_step": "alone",
        "test_split_vocabulary_with_padding": "True-1",
        "test_weighted_losses_of_several_predictions": "^3-True",
    },
    "run/test_rendezvous.py": {
        "test_a_store_that_is_not_there_is_one_line": "True",
        "test_agents_that_do_not_answer_end_a_start": "0",
        "test_values_of_a_rank_0_that_stops_or_ends": NONE,
    },
    "training/test_expert_balancing.py": {
        "test_checkpoint_loads_under_other_experts": NONE,
        "test_every_layout_moves_the_biases_of_one_process": "^2-pp=2",
        "test_resumed_run_equals_uninterrupted_bitwise": NONE,
        "test_config_trains": NONE,
    },
    "run/test_step_times.py": {
        "test_a_graph_from_the_cache_is_counted_once": NONE,
    },
    "setup/test_combinations.py": {
        "test_known_combinations": NONE,
        "test_the_page_is_what_the_rules_say": NONE,
    },
    "training/test_trainer.py": {
        "test_gradients_that_travel_in_bfloat16_have_the_sums_of_float32": NONE,
        "test_no_factor_is_rounded_to_bfloat16": "gpt",
        "test_a_signal_before_training_ends_all_ranks_before_the_first_step": NONE,
        "test_a_step_never_waits_for_a_value": NONE,
        "test_checkpoints_walk_through_all_layouts": NONE,
        "test_collectives_of_a_step": NONE,
        "test_collectives_of_tensor_and_pipeline_parallelism": NONE,
        "test_copy_engines_take_the_place_of_collectives": NONE,
        "test_every_layout_logs_the_losses_of_one_process": "^2-$",
        "test_resumed_run_equals_uninterrupted_bitwise": "llama-2",
        "test_steps_whose_tokens_do_not_fit_are_repeated": "layout[01]-",
        "test_a_run_that_is_stopped_before_a_look_repeats_its_steps_first": NONE,
        "test_validation_between_steps_changes_nothing": NONE,
        "test_resuming_from_another_run_keeps_both": NONE,
        "test_a_longer_run_keeps_its_warm_up_and_says_what_its_rate_does": NONE,
        "test_non_finite_figures_are_null_and_streaks_count_between_logs": NONE,
        "test_resuming_an_older_step_sets_the_abandoned_future_aside": NONE,
        "test_sampling_and_profile_and_masked_documents": NONE,
        "test_a_finished_trunk_goes_on_into_its_decay": NONE,
    },
    "parallelisms/test_plugin_encoder_decoder.py": {
        "test_encoder_and_decoder_on_different_stages_equal_one_process": "^pp2-1F1B$|ZBV",
        "test_causal_cross_attention_turns_parity_red": NONE,
    },
    "parallelisms/test_plugin_experts.py": {
        "test_what_one_rank_has_alone_keeps_its_gradients": NONE,
        "test_experts_of_ones_own": "^2-2",
    },
    "parallelisms/test_plugin_context.py": {
        "test_the_example_equals_one_process": "^4-2-ring",
        "test_packed_documents_equal_one_process": NONE,
    },
    "kernels/test_adamw.py": {
        "test_kernel_equals_formula_in_the_interpreter": NONE,
    },
    "kernels/test_sums.py": {
        "test_kernel_sums_in_float32_in_the_interpreter": NONE,
    },
    "test_architecture.py": {
        "test_python_files_that_texts_name_exist": NONE,
        "test_text_is_written_in_utf_8": NONE,
    },
    "parallelisms/test_matrix.py": {
        "test_what_is_refused": NONE,
        "test_failure_is_told_of_its_case": NONE,
    },
}
"""Of these test functions of a file the default run keeps what a pattern matches in the parameters'
ids, or nothing."""
REPEATED: dict[str, dict[str, str]] = {
    "checkpoints/test_convert.py": {
        "test_there_and_back_keeps_every_bit": "3",
    },
    "inference/test_serve_check.py": {
        "test_every_family_passes": "^(llama|deepseek_v3|gpt_oss)$",
    },
    "checkpoints/test_stores.py": {
        "test_a_kill_inside_a_save": "^index",
        "test_requests_that_fail_once_cost_nothing": "0",
    },
    "checkpoints/test_locations.py": {
        "test_a_run_that_dies_while_its_last_checkpoint_is_copied": "False-True|True-False",
    },
    "faults/test_entry.py": {
        "test_a_signal_before_training_is_one_line": "^2-0$|^15-5$",
    },
    "faults/test_guards.py": {
        "test_the_step_of_a_spike_or_of_a_nan_is_not_taken": "^experts.*poisoned|^embed.*spiking",
    },
    "faults/test_hangs.py": {
        "test_a_rank_that_stops_at_the_start_is_named": "^process.*-0$|^rendezvous",
    },
    "faults/test_memory.py": {
        "test_out_of_memory_is_one_message_of_all_ranks": "01",
    },
    "float8/test_statistics.py": {
        "test_steps_that_report_name_every_layer": "1$",
    },
    "models/test_decoder.py": {
        "test_blocks_compile_once_to_one_graph": "^(mixtral|deepseek_v3|gpt_oss)|override[23]$",
    },
    "models/test_router.py": {
        "test_recomputation_does_not_count_again": "selective-True",
    },
    "parallelisms/test_bfloat16.py": {
        "test_a_layout_is_as_exact_as_one_process": (
            "^2-llama|^2-mixtral.*ep 2|ring|gpt_oss|sequence_parallel|^4-"
        ),
    },
    "parallelisms/test_collectives.py": {
        "test_activations_of_a_layer": "^(qwen3-True|gpt-False|mixtral|deepseek_v3)",
        "test_gradients_of_replicated_parameters_are_reduced_once": "^(qwen3-True|gpt-F|deepseek)",
        "test_logits_are_never_gathered": "^(gpt|deepseek_v3)$",
    },
    "parallelisms/expert/test_symmetric_dispatch.py": {
        "test_bounded_buffers_equal_one_process": "deepseek_v3",
        "test_calls_of_forwards_backwards_and_recomputation_take_turns": "^(selective|full)-eager",
        "test_compiled_blocks_equal_one_process": "^deepseek_v3.*aot_eager",
    },
    "parallelisms/expert/test_deepep.py": {
        "test_equals_all_to_all": "shuffled",
        "test_models_train_alike": "deepseek_v3",
    },
    "parallelisms/expert/test_float8_dispatch.py": {
        "test_equals_experts_that_cast_what_they_get": "^(AllToAll-4|SymmetricMemory-[24])-2",
        "test_models_equal_one_process_whose_experts_cast": "etp=2|tp=2",
    },
    "parallelisms/test_plugin.py": {
        "test_layout_equals_one_process": "hf_llama-2r|hf_bert-4r|vit-2r-tp1|ZBV",
    },
    "plan/test_activations.py": {
        "test_products_that_the_backward_computes_again": "^(gpt|deepseek_v3-3|qwen3_moe)",
        "test_bytes_that_a_compiled_block_keeps": "^(llama|qwen3_moe|deepseek_v3-3)",
        "test_what_waits_for_weight_gradients": "^(gpt|qwen3_moe|deepseek_v3)",
        "test_what_waits_for_weight_gradients_of_float8": "wise$",
    },
    "plan/test_exact.py": {
        "test_a_backward_in_two_parts_holds_what_weight_gradients_need": "selective|dense",
    },
    "plan/test_feasibility.py": {
        "test_degrees": "deepseek_v3",
    },
    "plan/test_search.py": {
        "test_a_reader_that_goes_ends_it_quietly": "0",
    },
    "parallelisms/test_reported_bugs.py": {
        "test_a_model_keeps_its_groups_beside_another": "1",
    },
    "parallelisms/expert/test_expert_parallel.py": {
        "test_ranks_with_all_rows_and_with_none": "etp=2|symmetric",
        "test_shared_experts_are_computed_while_rows_travel": "enable|dispatch|^mixtral",
    },
    "parallelisms/tensor/test_async_tp.py": {
        "test_compiled_blocks_share_one_graph_with_the_operators": "True",
    },
    "parallelisms/test_compile.py": {
        "test_depth_adds_no_graph": "^(gpt|deepseek_v3-2-ep|qwen3)|schedule|hierarch|scaling|rank=",
        "test_experts_on_other_ranks_break_their_blocks": "deepseek_v3",
    },
    "parallelisms/test_fuzz.py": {
        "test_random_layout_equals_one_process": r"\.[01]$",
    },
    "parallelisms/test_offload.py": {
        "test_compiled_blocks": "full",
    },
    "parallelisms/pipeline/test_split_backward.py": {
        "test_gradients_equal_a_plain_backward_on_ranks": "micro|replicas|keep|dtype|collect=False",
        "test_experts_gradients_equal_a_plain_backward": "^(?!inductor)|32$",
        "test_inductor_keeps_what_is_queued": "selective",
    },
    "training/test_trainer.py": {
        "test_checkpoints_walk_through_all_layouts": "tied",
        "test_every_layout_logs_the_losses_of_one_process": "^4-(?!$|dp_rep.*2$)|pp_layout|sam",
        "test_steps_whose_tokens_do_not_fit_are_repeated": "layout2",
    },
}
"""Of these test functions of a file `-m full` keeps what a pattern matches; the others repeat it
with another model, layout or moment, and are in `-m matrix`."""

ONLY_BY_NAME = ("gpu", "matrix", "soak")
"""Markers of tests that run only where -m names the marker."""
COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that pytest found, selected or not."""


def run_of(nodeid: str) -> str:
    """The marker of the run that takes a test, by its node id from the root of the repository:
    empty for the default run, else "full" or "matrix"."""
    file, _, rest = nodeid.removeprefix("tests/").partition("::")
    function, _, ids = rest.removesuffix("]").partition("[")
    kept = KEPT.get(file, {}).get(function, NONE if file in FULL_FILES else "")
    if re.search(kept, ids):
        return ""
    repeated = REPEATED.get(file, {}).get(function, "")
    return "full" if re.search(repeated, ids) else "matrix"


def only_by_name(item: pytest.Item) -> set[str]:
    """The markers of ONLY_BY_NAME that a test has."""
    return {marker for marker in ONLY_BY_NAME if item.get_closest_marker(marker)}
