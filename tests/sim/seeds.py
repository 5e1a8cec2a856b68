"""Seeds that have found a bug once: they are run first, on both backends.

A seed keeps its world only as long as `world.draw` is left alone. So each has its cause beside it, and `mutations.py`
plants that cause again: after a change of `draw`, the first seed that notices it takes the place of the old one.
"""

from __future__ import annotations

from tests.sim.clock import Backend

FOUND: dict[int, str] = {
    8: "items of a caller who had left went on changing what admission counts",
    22: "of two drains at once the first never heard that the engine was empty",
    90: "a caller at the door while the engine closed got anyio's error rather than the engine's",
    107: "a caller who waited for room in front of parse heard of a drain's end only when there was room",
    179: "the stages in front of one that had given up crashed, and blamed the requests in their hands",
    278: "an engine with a broken stage said so only after the calls that still ran, however long they took",
    558: "a stop waited for every forward of a batch that was being bisected, rather than for one",
}

KILLS: dict[str, tuple[Backend, int]] = {
    "results_swapped_in_a_batch": ("trio", 2),
    "rows_put_at_the_index_of_another_item": ("trio", 0),
    "index_lost_between_stages": ("trio", 0),
    "rows_given_to_the_ticket_of_another_item": ("trio", 2),
    "answer_made_before_the_last_row": ("trio", 0),
    "tokens_of_the_usage_not_counted": ("trio", 0),
    "custody_settles_nothing": ("trio", 0),
    "custody_of_a_batch_covers_only_the_first_item": ("trio", 251),
    "first_item_of_a_batch_not_in_custody": ("trio", 0),
    "lists_that_are_taken_as_well_not_in_custody": ("trio", 690),
    "custody_never_lets_go": ("trio", 0),
    "worker_not_restarted": ("trio", 2),
    "crashes_never_counted_against_the_limit": ("trio", 21),
    "busy_workers_not_counted_down_after_a_crash": ("trio", 0),
    "broken_engine_says_so_only_when_all_calls_have_ended": ("trio", 278),
    "stage_behind_a_broken_one_counts_a_crash": ("asyncio", 179),
    "leaving_does_not_settle": ("trio", 3),
    "last_writer_wins": ("trio", 0),
    "drain_without_a_sweep": ("trio", 12),
    "no_sweep_of_what_closed_channels_still_held": ("trio", 7),
    "broken_engine_sweeps_nothing": ("trio", 28),
    "caller_at_the_door_not_woken": ("trio", 107),
    "closed_door_not_understood": ("trio", 90),
    "two_drains_and_one_is_forgotten": ("trio", 22),
    "door_open_while_draining": ("trio", 11),
    "timeout_of_a_request_not_kept": ("trio", 8),
    "abandoned_items_not_dropped_at_the_batch_door": ("trio", 13),
    "expired_items_not_dropped_before_preprocess": ("trio", 3),
    "bisecting_fails_all": ("trio", 7),
    "one_bad_input_fails_the_whole_preprocess_call": ("trio", 22),
    "budget_never_lowered": ("trio", 73),
    "out_of_memory_tried_again_for_ever": ("trio", 0),
    "stop_waits_for_a_whole_bisection": ("trio", 558),
    "freed_room_not_announced": ("trio", 6),
    "waiting_work_not_announced": ("trio", 0),
    "waiting_room_without_a_limit": ("trio", 6),
    "one_slot_more_than_the_device_has": ("trio", 2),
    "failed_forwards_count_as_running_for_ever": ("trio", 7),
    "batch_keys_ignored": ("trio", 2),
    "token_budget_ignored": ("trio", 16),
    "waiting_cost_not_given_back_for_unwanted_items": ("trio", 18),
    "end_of_the_stream_not_passed_on_by_parse": ("trio", 0),
    "end_of_the_stream_not_passed_on_by_preprocess": ("trio", 0),
    "limiter_token_leaked_when_a_call_fails": ("trio", 13),
    "admission_room_leaked_when_a_request_fails": ("trio", 0),
    "estimates_not_corrected": ("trio", 0),
    "computed_tokens_still_count_as_inside": ("trio", 0),
    "callers_who_left_change_the_count": ("trio", 8),
    "items_counted_twice": ("trio", 0),
}
"""The first seed that notices each planted bug; `python -m tests.sim --mutations` prints them anew."""
