"""Which tests hold each known way of going wrong: a case whose test is renamed or removed shows here.

A: rotation. B: positions. C: layout, number formats and identity. D: operations.
"""

from __future__ import annotations

import ast
from functools import lru_cache

import pytest

from tests.repo.tree import ROOT

CASES = {
    "A1 cached keys rotated a second time": """
        contract/test_cases_rotation_state.py::test_keys_in_the_other_state_are_converted_and_attend_the_same
        contract/test_cases_rotation_state.py::test_without_the_conversion_attention_is_visibly_wrong
        contract/test_cases_rotation_state.py::test_an_absent_or_unknown_key_state_is_refused_and_never_guessed
        contract/test_cases_lengths.py::test_each_conversion_attends_like_the_readers_own_cache_at_every_length
        contract/test_cases_lengths.py::test_keys_rotated_a_second_time_give_other_logits_at_every_length_above_one
    """,
    "A2 rotated for the cache only": """
        contract/test_cases_lengths.py::test_a_rotation_that_only_the_cache_gets_shows_in_the_writer_s_own_first_token
        contract/test_cases_lengths.py::test_a_rotation_that_only_attention_gets_shows_in_the_shipped_bytes
        contract/test_lying_writers.py::test_a_lie_is_caught_by_its_witnesses_before_a_token_is_seen
    """,
    "A3 pairing flag ignored": """
        contract/test_cases_lanes.py::test_eight_rotary_lanes_of_sixteen_are_put_in_the_readers_order
        contract/test_cases_lanes.py::test_reading_keys_in_the_wrong_lane_order_gives_other_logits
        contract/test_cases_lanes.py::test_interleaved_sections_of_positions_are_not_a_lane_order
        contract/test_cases_lengths.py::test_pairs_are_put_in_order_beside_sections_of_positions_too
    """,
    "A4 weight rows permuted with the wrong head count": """
        contract/test_permuted_twins.py::test_permuted_rows_in_a_folder_of_plain_ones_are_refused
        contract/test_permuted_twins.py::test_a_gguf_whose_key_rows_were_permuted_with_another_head_count_is_refused
    """,
    "A5 correct scores, other key bytes": """
        contract/test_cases_lanes.py::test_a_shared_rotary_row_that_was_stored_deinterleaved_is_put_back
        contract/test_cases_a_rope_width.py::test_the_two_deepseeks_store_one_latent_row_in_two_orders
    """,
    "A6 partial rotary dropped": """
        contract/test_cases_a_rope_width.py::test_four_of_sixteen_lanes_in_every_spelling
        contract/test_cases_a_rope_width.py::test_an_absent_width_is_the_architecture_s_own
        contract/test_cases_a_rope_width.py::test_lanes_that_dont_turn_arrive_as_they_were
        contract/test_cases_a_rope_width.py::test_another_width_is_refused
        contract/test_cases_lengths.py::test_each_conversion_attends_like_the_readers_own_cache_at_every_length
    """,
    "A8 theta silently 10000": """
        contract/test_cases_a_rope_spelling.py::test_theta_means_the_same_wherever_it_is_written
        contract/test_cases_a_rope_spelling.py::test_a_theta_that_is_no_positive_number_is_refused
        contract/test_cases_a_rope_spelling.py::test_a_different_theta_is_one_refused_difference_named_inv_freq
        contract/test_cases_a_rope_defaults.py::test_a_theta_absent_everywhere_is_the_architecture_s_own
    """,
    "A9 type and rope_type": """
        contract/test_cases_a_rope_spelling.py::test_the_type_means_the_same_under_either_name
        contract/test_cases_a_rope_spelling.py::test_two_different_types_are_refused_with_both_values
        contract/test_cases_a_rope_spelling.py::test_an_unknown_type_is_refused_by_name
        contract/test_cases_a_rope_defaults.py::test_su_and_yarn_mean_longrope_in_phi3_alone
    """,
    "A10 YaRN factor overridden by the ratio of lengths": """
        contract/test_cases_a_rope_amplitude.py::test_an_explicit_yarn_factor_holds_against_the_ratio_of_lengths
    """,
    "A11 attention_factor dropped": """
        contract/test_cases_a_rope_amplitude.py::test_an_explicit_attention_factor_is_the_amplitude
        contract/test_cases_a_rope_amplitude.py::test_an_attention_factor_equal_to_the_derived_one_makes_no_difference
    """,
    "A12 mscale pair ignored": """
        contract/test_cases_a_rope_amplitude.py::test_the_mscale_pair_is_a_ratio_and_half_a_pair_counts_for_nothing
        contract/test_cases_a_rope_amplitude.py::test_an_ignored_mscale_pair_is_refused_by_amplitude_alone
    """,
    "A13 softmax scale without YaRN's square": """
        contract/test_cases_a_rope_amplitude.py::test_latent_attention_takes_the_square_of_its_weight_into_the_softmax_scale
        contract/test_cases_a_rope_amplitude.py::test_a_softmax_scale_without_the_square_is_refused_by_that_field_alone
    """,
    "A15 llama3 scaling never used": """
        contract/test_cases_a_rope_spelling.py::test_scaling_on_one_side_only_is_refused_when_two_sides_pair
        unit/test_rope.py::test_llama3_scaling_keeps_short_waves_blends_the_middle_and_divides_long_waves
    """,
    "A16 per-layer rotation flattened": """
        contract/test_cases_a_rope_layers.py::test_scaling_of_global_layers_stays_off_windowed_layers
        contract/test_cases_a_rope_layers.py::test_layer_types_and_a_pattern_of_one_meaning_are_one_contract
        contract/test_cases_a_rope_layers.py::test_a_change_of_some_layers_is_refused_naming_them
    """,
    "A18 dynamic table over old keys": """
        contract/test_cases_a_rope_lengths.py::test_dynamic_theta_at_a_length
        contract/test_cases_a_rope_lengths.py::test_a_table_that_moves_with_the_current_length_is_refused_past_its_switch
        contract/test_cases_lengths.py::test_a_request_keeps_the_table_of_its_whole_length_across_a_switch
        contract/test_cases_lengths.py::test_keys_of_the_short_table_under_the_long_one_give_another_output
        contract/test_cases_lengths.py::test_requests_of_10_and_60_tokens_side_by_side_keep_their_own_tables
    """,
    "A20 longrope switch with a live cache": """
        contract/test_cases_a_rope_lengths.py::test_exactly_the_original_length_is_short
        contract/test_cases_a_rope_lengths.py::test_longrope_lists_of_a_partial_rotation_are_half_of_the_turning_lanes
        contract/test_cases_lengths.py::test_a_request_keeps_the_table_of_its_whole_length_across_a_switch
        contract/test_cases_lengths.py::test_terms_whose_keys_are_of_another_table_than_the_request_s_are_refused
        contract/test_measured_failures.py::test_one_longrope_folder_served_for_another_length_is_refused
    """,
    "A21 half-precision frequencies or positions": """
        contract/test_cases_a_rope_defaults.py::test_angles_are_float32_where_halves_would_lose_the_turn
        contract/test_cases_a_rope_defaults.py::test_positions_are_integers_that_float32_holds_and_bfloat16_doesnt
        contract/test_cases_a_rope_defaults.py::test_a_table_of_bfloat16_numbers_is_another_table
        contract/test_cases_lengths.py::test_keys_far_out_are_turned_by_their_integer_positions
    """,
    "A23 unturned layers turned": """
        contract/test_cases_a_rope_layers.py::test_turning_an_unturned_layer_or_an_inverted_list_is_refused_naming_layers
        contract/test_cases_a_rope_layers.py::test_a_one_means_that_the_layer_turns_and_an_empty_list_means_the_interval
        contract/test_cases_lengths.py::test_a_prompt_from_position_8192_on_keeps_its_true_positions_though_no_key_turns
    """,
    "B1 slots of a left-padded prompt used as positions": """
        contract/test_cases_positions.py::test_a_left_padded_prompt_is_handed_over_without_its_pads_and_goes_on_at_its_own_position
        contract/test_cases_positions.py::test_slots_of_a_padded_prompt_taken_for_positions_give_another_output
        contract/test_cases_positions.py::test_pads_in_front_are_refused_by_their_slot_and_left_out_position_3_follows
    """,
    "B2 one cursor for merged caches": """
        contract/test_cases_positions.py::test_prompts_of_30_and_25_tokens_keep_next_positions_30_and_25
        contract/test_cases_positions.py::test_two_prompts_decoded_together_are_each_their_own_golden
        contract/test_cases_positions.py::test_the_longer_prompt_s_cursor_gives_the_shorter_one_another_output
    """,
    "B4 fragments put together without a turn": """
        contract/test_cases_rebase.py::test_a_fragment_moved_by_sixteen_has_the_keys_of_its_new_positions
        contract/test_cases_rebase.py::test_values_of_a_moved_fragment_never_saw_the_prefix_so_the_output_is_only_close
        contract/test_cases_rebase.py::test_a_table_of_each_length_is_refused
        contract/test_cases_rebase.py::test_keys_without_an_angle_in_them_come_back_as_they_are
        contract/test_cases_positions.py::test_a_fragment_at_positions_that_were_given_before_is_refused
    """,
    "B7 ring wrap": """
        contract/test_cases_positions.py::test_after_12_tokens_the_slots_of_a_ring_of_8_hold_8_to_11_and_4_to_7
        contract/test_cases_positions.py::test_a_window_needs_the_positions_that_the_next_token_sees
        contract/test_cases_positions.py::test_a_ring_that_is_unrolled_by_position_goes_on_like_the_whole_prompt
        contract/test_cases_positions.py::test_a_ring_read_in_the_order_of_its_slots_is_wrong_once_it_wrapped
        contract/test_cases_positions.py::test_positions_in_the_order_of_a_ring_s_slots_are_refused
    """,
    "B9 delta of a picture lost": """
        contract/test_cases_positions.py::test_18_tokens_with_a_picture_go_on_at_10_and_terms_of_one_row_cant_say_so
        contract/test_cases_positions.py::test_text_alone_has_a_delta_of_zero
        contract/test_cases_positions.py::test_a_model_with_several_position_rows_is_refused_when_it_is_loaded_and_beside_one_without
    """,
    "B10 a prompt of whole blocks, all of it cached": """
        contract/test_cases_prefix.py::test_a_full_prompt_whose_first_token_is_shipped_takes_its_own_blocks_and_no_more
        contract/test_cases_prefix.py::test_without_a_first_token_one_row_is_computed_again_and_no_key_is_written_twice
        contract/test_cases_prefix.py::test_a_row_that_is_written_a_second_time_would_show
        contract/test_cases_prefix.py::test_a_prompt_that_is_cached_as_a_whole_computes_one_row
        contract/test_cases_prefix.py::test_a_prefix_held_on_both_sides_is_neither_computed_nor_sent_again
        contract/test_cases_prefix.py::test_a_decode_worker_that_computed_the_prompt_itself_takes_only_the_rest
    """,
    "B11 chunk boundaries": """
        contract/test_cases_chunks.py::test_every_block_has_one_hash_on_both_ends_though_the_second_chunk_comes_late
        contract/test_cases_chunks.py::test_blocks_that_are_read_before_they_are_written_have_other_hashes
        contract/test_cases_chunks.py::test_a_prompt_computed_in_chunks_decodes_as_its_golden
        contract/test_cases_chunks.py::test_chunks_of_a_layer_make_it_whole_once_or_are_refused
        contract/test_handoff_suite.py::test_a_faulty_push_ends_the_handoff_once_and_frees_every_block
    """,
    "C1 few heads over many ranks": """
        contract/test_cases_shards.py::test_every_reader_rank_gets_its_own_heads
        contract/test_cases_shards.py::test_four_ranks_of_two_heads_hold_0_0_1_1_and_the_lowest_replica_gives_each
        contract/test_cases_shards.py::test_replicas_mapped_another_way_are_refused
        contract/test_cases_shards.py::test_three_ranks_of_two_heads_are_refused_by_name
    """,
    "C2 NHD and HND": """
        contract/test_cases_layout.py::test_axis_orders_are_told_apart_where_every_shape_is_equal
        contract/test_cases_layout.py::test_reading_without_the_relayout_is_wrong
        unit/test_jsonform.py::test_an_unset_or_wrong_field_is_refused_by_its_name
        unit/test_validate.py::test_a_field_that_is_unset_or_out_of_range_is_named
        contract/test_cases_lengths.py::test_each_conversion_attends_like_the_readers_own_cache_at_every_length
    """,
    "C3 block sizes": """
        contract/test_cases_layout.py::test_any_block_size_lands_as_any_other
        contract/test_cases_lengths.py::test_each_conversion_attends_like_the_readers_own_cache_at_every_length
    """,
    "C4 bits of another dtype": """
        contract/test_cases_dtype.py::test_bfloat16_bits_read_as_float16_are_another_number
        contract/test_cases_dtype.py::test_every_pair_of_dtypes_is_converted_to_the_same_numbers_or_refused
        contract/test_cases_dtype.py::test_keys_and_values_may_have_dtypes_of_their_own
        contract/test_cases_lengths.py::test_wider_numbers_are_the_writer_s_own_at_every_length
    """,
    "C5 scales missing or swapped": """
        contract/test_cases_dtype.py::test_scales_multiply_the_tensor_the_head_or_the_token_that_they_are_for
        contract/test_cases_dtype.py::test_a_missing_scale_is_refused_and_never_taken_as_one
        contract/test_cases_dtype.py::test_a_scale_that_is_no_positive_number_is_refused
        contract/test_cases_dtype.py::test_swapped_scales_of_keys_and_values_are_caught
    """,
    "C6 one side has more layers": """
        contract/test_cases_shards.py::test_pipeline_stages_are_paired_by_layer_whatever_their_order
        contract/test_cases_shards.py::test_a_side_with_one_more_layer_is_refused_by_its_index
        contract/test_cases_shards.py::test_layers_of_other_widths_are_converted_by_index_not_by_order
        contract/test_lying_writers.py::test_a_lie_is_caught_by_its_witnesses_before_a_token_is_seen
    """,
    "C8 adapter identity": """
        contract/test_cases_adapters.py::test_base_a_b_and_a_reloaded_are_four_identities_of_one_prompt
        contract/test_cases_adapters.py::test_an_adapter_is_its_tensors_in_any_order_and_nothing_else
        unit/test_content_identity.py::test_an_adapter_is_another_content_by_what_it_holds
        contract/test_cases_adapters.py::test_a_cache_made_with_an_adapter_is_refused_by_a_side_without_and_both_are_named
    """,
    "C9 bytes that aren't what was sent": """
        contract/test_cases_operations.py::test_broken_bytes_are_refused_and_the_log_names_the_handoff_and_the_block
        contract/test_fault_table.py::test_a_fault_ends_the_handoff_once_for_its_reason_and_the_next_one_lands
        contract/test_handoff_suite.py::test_a_faulty_push_ends_the_handoff_once_and_frees_every_block
        contract/test_lying_writers.py::test_a_lie_is_caught_by_its_witnesses_before_a_token_is_seen
    """,
    "D2 a failed or stale transfer answered as if it were whole": """
        contract/test_cases_operations.py::test_an_order_for_an_unknown_handoff_is_refused
        contract/test_cases_operations.py::test_blocks_out_of_range_are_refused_before_a_byte_lands
        contract/test_cases_operations.py::test_a_handoff_is_decoded_once_and_the_second_order_is_refused
        contract/test_cases_operations.py::test_a_writer_keeps_the_blocks_of_a_transfer_that_stalls_while_it_computes_another_prompt
        contract/test_cases_operations.py::test_an_order_after_the_lease_is_refused_though_another_prompt_has_the_blocks
        contract/test_cases_operations.py::test_after_a_faulty_attempt_the_same_prompt_gives_the_tokens_of_one_process
        contract/test_fault_table.py::test_after_commit_a_corrupted_order_is_refused_and_the_handoff_waits_for_the_right_one
    """,
    "D3 a peer restarted at its address": """
        contract/test_cases_operations.py::test_messages_for_a_reader_s_old_life_are_fenced_by_the_new_one
        contract/test_cases_operations.py::test_a_writer_s_next_life_frees_what_its_old_one_reserved_and_works_at_once
        contract/test_cases_operations.py::test_an_offer_of_an_old_life_that_comes_late_is_fenced_and_ends_nothing
        contract/test_fault_table.py::test_after_commit_a_receiver_that_dies_is_another_life_that_knows_nothing
        cluster/test_kills.py::test_a_worker_killed_in_the_middle_of_a_transfer_comes_back_at_its_address_and_the_other_goes_on
    """,
    "D4 aborted requests leak blocks": """
        cluster/test_cancel_storm.py::test_500_requests_given_up_at_any_state_leave_every_block_free_five_times_over
        cluster/test_cancel_storm.py::test_one_reservation_that_nobody_gives_up_shows
        contract/test_roles_in_process.py::test_an_order_that_is_cancelled_at_any_moment_gives_its_turn_back
    """,
    "D5 blocks reused while the old writer still writes": """
        contract/test_cases_operations.py::test_a_prompt_in_the_blocks_of_an_aborted_transfer_decodes_as_its_golden_and_late_bytes_are_refused
        contract/test_cases_operations.py::test_blocks_stay_out_of_use_while_a_thread_of_an_aborted_landing_may_write
        contract/test_handoff_suite.py::test_blocks_stay_while_a_landing_still_writes_into_them
    """,
    "D7 a lease that ends while decode is queued": """
        contract/test_cases_operations.py::test_a_lease_that_ends_before_decode_is_an_error_and_its_blocks_serve_the_next_prompt
        contract/test_cases_operations.py::test_a_slow_transfer_outlives_its_lease_because_it_is_renewed
        contract/test_cases_operations.py::test_no_lease_ends_what_decode_took_however_long_it_is_queued
        cluster/test_kills.py::test_a_worker_stopped_for_longer_than_a_lease_in_a_transfer_wakes_up_fenced
    """,
}  # fmt: skip
IDS = (
    "A1 A2 A3 A4 A5 A6 A8 A9 A10 A11 A12 A13 A15 A16 A18 A20 A21 A23 B1 B2 B4 B7 B9 B10 B11 C1 C2 C3 C4 C5 "
    "C6 C8 C9 D2 D3 D4 D5 D7"
)


@lru_cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions)


def missing(nodes: str) -> list[str]:
    """Node ids that name no test."""
    pairs = [(node, *node.split("::")) for node in nodes.split()]
    return [node for node, file, name in pairs if name not in names_in(file)]


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_case_are_there(case: str) -> None:
    assert CASES[case].split()
    assert missing(CASES[case]) == []


def test_every_case_is_listed_and_a_removed_test_is_noticed() -> None:
    assert [case.split()[0] for case in CASES] == IDS.split()
    assert missing("contract/test_cases_index.py::test_that_was_removed") == [
        "contract/test_cases_index.py::test_that_was_removed"
    ]
