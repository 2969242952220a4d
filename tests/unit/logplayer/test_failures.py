"""The failures that docs/player.md lists, each with tests that try it."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.named_tests import ROOT, check_exists

_UNIT: Final = "tests/unit/logplayer"
_TARGETS: Final = f"{_UNIT}/targets/test"
_PUSH: Final = f"{_UNIT}/push/test"
_REAL: Final = "tests/integration/logplayer/test"

#: By section and by the first cell of a row: for each module, the tests. "test_" is left out.
TESTED: Final[dict[str, dict[str, dict[str, str]]]] = {
    "SQL": {
        "death before the commit reached the server": {
            f"{_TARGETS}_sql": "death_before_the_commit_changes_nothing",
        },
        "death or lost connection after the commit was sent": {
            f"{_TARGETS}_sql": "lost_answer_of_a_commit_is_learned_by_opening",
        },
        "death before the cursor moved": {
            f"{_TARGETS}_sql": "death_before_the_cursor_moved_repeats_nothing",
        },
        "a former owner wakes up before its update": {
            f"{_TARGETS}_sql": "former_owner_is_fenced",
            f"{_REAL}_postgres": "update_that_waited_sees_the_new_term",
        },
        "a former owner stands still in its transaction": {
            f"{_TARGETS}_sql": "owner_in_its_transaction_is_waited_for",
            f"{_TARGETS}_sqlite_target": "locked_file_is_a_reason_to_retry",
            f"{_REAL}_postgres": "server_ends_a_session_that_stands_still_in_its_transaction",
        },
        "power cut of the database": {
            f"{_TARGETS}_sqlite_target": "commits_are_on_stable_storage",
            f"{_REAL}_postgres": "session_is_durable_and_holds_no_lock_for_long"
            " crash_of_the_server_loses_and_repeats_nothing",
        },
        "an older backup, or an asynchronous replica, takes over": {
            f"{_TARGETS}_sql": "older_state_of_the_database_is_played_on_from_there",
            f"{_UNIT}/test_task": "a_target_below_the_trim_point_fails_the_task",
        },
        "an older backup, from before the last seek, takes over": {
            f"{_TARGETS}_sql": "older_state_from_before_a_seek_fails_the_task_until_a_seek",
        },
        "the row or the database is gone": {
            f"{_TARGETS}_sql": "emptied_database_fails_the_task_until_a_seek",
        },
        "the database belongs to another cluster, or has another number of partitions": {
            f"{_TARGETS}_sql": "position_of_another_cursor_is_refused",
            f"{_REAL}_player": "positions_of_another_cluster_are_refused",
        },
    },
    "HTTP": {
        "2xx": {f"{_REAL}_http_target": "batch_is_one_request"},
        "408, 425, 429, 5xx; none, or none that is whole within `timeout_s`": {
            f"{_REAL}_http_target": "temporary_answers_are_reasons_to_retry"
            " lost_answer_is_a_reason_to_retry slow_endpoint_is_a_reason_to_retry"
            " answer_that_does_not_end_is_a_reason_to_retry"
            " cut_answer_of_an_endpoint_is_a_reason_to_retry",
        },
        "409": {
            f"{_REAL}_http_target": "temporary_answers_are_reasons_to_retry"
            " endpoint_refuses_other_terms_and_positions",
        },
        "401, 403, 404, 405, 410, 3xx, 1xx other than 100": {
            f"{_REAL}_http_target": "answers_about_the_configuration_stop_the_task",
        },
        "other 4xx": {f"{_REAL}_http_target": "refusals_reject_the_batch"},
    },
    "Files": {
        "death or a power cut in D, before the sync": {
            f"{_TARGETS}_files_target": "frame_that_a_crash_cut_does_not_count",
            f"{_TARGETS}_files_owners": "any_crash_leaves_each_record_once",
        },
        "death or a power cut in D, after the sync": {
            f"{_TARGETS}_files_owners": "any_crash_leaves_each_record_once",
        },
        "death in R, before the link": {
            f"{_TARGETS}_files_owners": "unfinished_files_of_former_terms_are_removed"
            " any_crash_leaves_each_record_once",
        },
        "death between the link and the sync of the directory, or a power cut": {
            f"{_TARGETS}_files_owners": "name_that_was_not_synced_is_synced_before_it_counts",
        },
        "death after that, before the identity is replaced or the staged file is removed": {
            f"{_TARGETS}_files_owners": "any_crash_leaves_each_record_once",
        },
        "a former owner wakes up before it stages a frame": {
            f"{_TARGETS}_files_target": "former_owner_with_a_staged_file_is_fenced",
            f"{_TARGETS}_files_owners": "former_owner_is_fenced",
        },
        "a former owner wakes up in R before it creates its file": {
            f"{_TARGETS}_files_owners":
                "owner_that_stood_still_before_it_looks_finds_the_later_term",
        },
        "a former owner stands still between that look and the link": {
            f"{_TARGETS}_files_owners": "owner_that_stood_still_before_its_link_adds_nothing"
            " file_that_a_former_owner_adds_during_an_open_counts",
        },
        "a former owner stages a frame after F has read the staged files": {
            f"{_TARGETS}_files_owners": "any_order_of_steps_keeps_each_record_once",
        },
        "a former owner, or another worker of the same term, stands still in F while a staged file"
        " begins": {
            f"{_TARGETS}_files_owners": "former_owner_that_stands_still_in_an_open_is_fenced"
            " staged_file_of_a_later_worker_stays",
        },
        "a former owner passes positions without records": {
            f"{_TARGETS}_files_owners": "former_owner_passes_no_positions",
        },
        "two owners at the same point, where a file system shows changes late": {
            f"{_TARGETS}_files_owners": "the_name_decides_where_a_file_system_shows_changes_late",
        },
        "a former owner is behind, there": {
            f"{_TARGETS}_files_owners": "owners_with_different_positions_give_a_record_one_name",
        },
        "the directory is empty, or another one": {
            f"{_TARGETS}_files_owners": "an_emptied_directory_is_not_taken_for_complete",
            "tests/sim/player/test_player": "a_run_whose_files_are_removed_violates_nothing",
            f"{_TARGETS}_files_target": "absent_directory_fails_the_task_until_a_seek",
        },
        "the directory belongs to another target, partition or cluster, or has another format": {
            f"{_TARGETS}_files_target": "directory_of_another_task_is_refused"
            " format_of_a_directory_is_fixed",
        },
        "a seek in front of the last record": {
            f"{_TARGETS}_files_target": "seek_behind_the_last_record_is_refused",
            f"{_REAL}_files_target": "seek_back_fails_the_task_until_a_seek_after_the_files",
        },
        "the directory is emptied while the `open` of a former owner stands still, which claimed"
        " the cursor before it first moved": {
            f"{_TARGETS}_files_owners":
                "a_late_open_makes_an_emptied_directory_begin_at_the_start",
        },
        "an older copy of the directory is put back": {
            f"{_TARGETS}_files_target": "older_copy_of_the_directory_is_played_on_from_there"
            " older_state_from_before_a_seek_fails_the_task_until_a_seek",
        },
        "the file system is full, or gone": {
            f"{_TARGETS}_files_target": "file_system_that_is_full_or_gone_is_retried",
        },
    },
    "LogDB": {
        "death before the commit": {
            f"{_TARGETS}_logdb_target": "any_order_of_steps_keeps_position_and_effects_equal",
        },
        "death, or a commit of unknown outcome": {
            f"{_TARGETS}_logdb_target": "late_commit_has_no_effect_after_an_open",
            f"{_REAL}_logdb_target": "commit_of_unknown_outcome_is_not_repeated"
            " commit_that_read_before_an_open_is_aborted",
        },
        "another client changes what `apply` has read": {
            f"{_TARGETS}_logdb_target":
                "apply_runs_again_if_another_client_changes_what_it_has_read",
        },
        "a former owner delivers": {f"{_TARGETS}_logdb_target": "former_owner_is_fenced"},
        "the database is empty, or another one": {
            f"{_TARGETS}_logdb_target": "emptied_database_fails_the_task_until_a_seek"
            " position_of_another_cursor_is_refused",
        },
        "an older database, from before the last seek, is put back": {
            f"{_TARGETS}_logdb_target":
                "older_state_from_before_a_seek_fails_the_task_until_a_seek",
        },
        "the database is on the log that the player reads": {
            f"{_TARGETS}_logdb_target": "log_of_the_player_is_refused_without_a_map",
            f"{_REAL}_logdb_target": "database_on_the_log_of_the_player_is_refused",
        },
    },
    "Another log": {
        "death between two units": {
            f"{_TARGETS}_log_target": "any_order_of_steps_keeps_each_row_once_and_in_order",
            f"{_REAL}_log_target": "deaths_and_suspensions_of_owners",
        },
        "the outcome of a unit is unknown": {
            f"{_TARGETS}_log_target": "failed_batch_is_delivered_again_after_an_open",
        },
        "a former owner wakes up": {
            f"{_TARGETS}_log_target": "any_order_of_steps_keeps_each_row_once_and_in_order",
            f"{_REAL}_log_target": "deaths_and_suspensions_of_owners",
        },
        "a former owner wakes up after the shard was removed": {
            f"{_TARGETS}_log_target": "any_order_of_steps_keeps_each_row_once_and_in_order",
            f"{_UNIT}/test_marks": "an_owner_that_cannot_commit_its_mark_delivers_nothing",
        },
        "death after a shard was chosen, before the commit": {
            f"{_UNIT}/test_marks": "a_new_mark_is_committed_before_the_first_batch",
            "tests/sim/player/test_mirrors": "a_run_violates_nothing",
        },
        "death after the commit": {
            f"{_TARGETS}_log_target":
                "rows_of_a_removed_shard_are_followed_by_those_of_another_one",
        },
        "all servers of the shard lose their memory": {
            f"{_TARGETS}_log_target": "rows_that_are_not_on_disk_are_written_again"
            " loss_of_memory_in_the_middle_of_a_batch_leaves_no_gap",
        },
        "the shard is parked or recovering": {
            f"{_TARGETS}_log_target": "shard_that_recovers_is_waited_for",
        },
        "the source's log repeats rows": {
            f"{_REAL}_player": "rows_that_a_writer_repeats_are_delivered_once",
        },
        "the source's log repeats rows that were trimmed, and only one of two owners knows them": {
            f"{_TARGETS}_mirrors_and_trims":
                "owner_that_counts_other_rows_than_the_former_one_writes_nothing"
                " batches_before_the_last_row_of_the_mirror_are_passed_over",
            "tests/sim/player/test_mirrors": "a_source_that_repeats_trimmed_rows_violates_nothing",
        },
        "`map`, `keys` or `not_from` is another one at the next owner": {
            f"{_TARGETS}_mirrors_and_trims":
                "owner_that_counts_other_rows_than_the_former_one_writes_nothing",
        },
        "the mirror was trimmed between two owners": {
            f"{_TARGETS}_mirrors_and_trims":
                "second_owner_of_a_trimmed_mirror_continues_behind_a_row_that_is_left",
        },
        "a record is larger than the mirror allows": {
            f"{_TARGETS}_log_target": "record_that_is_too_large_is_rejected_before_anything_is_sent"
            " limits_are_those_of_the_beginning",
        },
        "a seek of the cursor": {
            f"{_TARGETS}_log_target": "what_cannot_be_a_mirror_fails",
            f"{_REAL}_log_target": "seek_of_a_mirror_is_refused",
        },
        "another cluster in the place of the mirror": {
            f"{_TARGETS}_log_target": "another_log_in_the_place_of_the_mirror_is_refused",
        },
        "the log itself in the place of the mirror": {
            f"{_TARGETS}_log_target": "what_cannot_be_a_mirror_fails",
            f"{_REAL}_log_target": "the_log_itself_is_refused_as_its_mirror",
        },
    },
    "Push: a target in another process": {
        "a message is lost": {
            f"{_PUSH}_push": "a_store_gets_each_record_once_over_a_bad_channel"
            " a_batch_is_sent_once_and_then_asked_for",
        },
        "a message comes twice": {
            f"{_PUSH}_receiver_node": "a_repetition_is_answered_from_memory",
        },
        "a batch comes after the query for it": {
            f"{_PUSH}_receiver_node": "a_batch_that_comes_after_its_query_is_refused",
        },
        "an old message comes late": {
            f"{_PUSH}_receiver_node": "an_old_number_is_ignored lower_terms_are_refused",
        },
        "the receiver dies before the target's step": {
            f"{_PUSH}_push": "a_receiver_that_restarts_is_opened_again",
            f"{_PUSH}_sender": "what_is_behind_a_failure_is_opened_before_the_next_batch",
        },
        "the receiver dies after the target's step": {
            f"{_PUSH}_push": "a_store_gets_each_record_once_although_all_processes_die"
            " a_target_without_position_is_opened_again_before_the_next_batch",
        },
        "the receiver is suspended": {
            f"{_PUSH}_sender": "a_silent_receiver_leaves_the_outcome_unknown",
            f"{_PUSH}_receiver_node": "an_open_waits_for_the_step_of_the_former_claim",
        },
        "the player dies": {
            f"{_PUSH}_receiver_node": "a_term_is_refused_from_the_request_of_a_later_one_on",
            f"{_REAL}_push": "each_record_is_there_once_although_receiver_and_player_are_killed",
        },
        "a player is suspended, and wakes up": {
            f"{_PUSH}_receiver_node": "lower_terms_are_refused",
            "tests/sim/player/test_player": "a_run_with_receivers_violates_nothing",
        },
        "a new claim comes while the former one's step is under way": {
            f"{_PUSH}_receiver_node": "an_open_waits_for_the_step_of_the_former_claim",
        },
        "the target behind is down": {
            f"{_PUSH}_push": "the_pause_that_a_target_asks_for_reaches_the_player",
        },
        "another program listens at the address": {
            f"{_PUSH}_sender": "another_program_at_the_endpoint_fails_the_task",
            f"{_REAL}_push": "another_program_at_the_address_fails_the_task",
        },
        "the receiver has another version of push": {
            f"{_PUSH}_sender": "a_receiver_of_another_version_is_tried_again",
        },
    },
    "Operation": {
        "a process dies": {
            f"{_UNIT}/test_members": "the_tasks_of_a_dead_process_are_taken_over_after_its_lease",
            f"{_REAL}_player": "processes_share_tasks_and_survive_deaths",
        },
        "a process gets SIGTERM or Ctrl-C": {
            f"{_UNIT}/test_members":
                "the_tasks_of_a_process_that_stops_are_taken_over_before_the_next_list",
            f"{_UNIT}/test_node": "a_stop_drains_moves_and_releases",
            f"{_REAL}_player": "a_file_changes_one_process_after_the_other_under_load",
        },
        "a process is suspended for longer than its lease": {
            f"{_UNIT}/test_members": "a_process_that_stood_still_finds_its_claims_lost",
            f"{_REAL}_player": "a_process_that_was_suspended_repeats_nothing",
        },
        "a process is cut off from the membership service": {
            f"{_UNIT}/test_members": "a_process_that_is_cut_off_stops_after_a_lease"
            " a_process_that_is_cut_off_opens_no_target",
        },
        "the membership service has no leader": {
            f"{_UNIT}/test_members":
                "without_a_leader_it_plays_for_a_lease_and_goes_on_with_the_same_terms",
        },
        "the membership service is absent when a process starts": {
            f"{_UNIT}/test_members": "a_process_begins_while_the_service_is_away",
            f"{_REAL}_player": "a_log_that_does_not_reply_is_reported",
        },
        "a target is down, hangs, or has a full disk": {
            f"{_UNIT}/test_task": "pauses_double_while_a_target_is_down",
            f"{_TARGETS}_sqlite_target": "full_disk_is_a_reason_to_retry",
            f"{_TARGETS}_files_target": "file_system_that_is_full_or_gone_is_retried",
            f"{_REAL}_player": "a_target_that_hangs_delays_no_other_and_is_named_at_the_stop",
        },
        "a target is slow": {f"{_UNIT}/test_node": "a_slow_task_falls_out_and_comes_back"},
        "many tasks are behind at once": {
            f"{_UNIT}/test_feed": "so_many_tasks_at_once_read_for_themselves",
            f"{_UNIT}/test_node": "many_tasks_that_read_for_themselves_come_to_rest",
        },
        "a shard is recovered": {
            f"{_UNIT}/test_feed": "a_feed_names_the_shard_that_it_waits_for",
        },
        "the cluster restarts, or shards join and leave": {
            f"{_REAL}_whole_cluster":
                "delivery_continues_after_a_restart_and_with_other_shards",
        },
        "all servers of a shard lose their memory at durability level `memory`": {
            f"{_REAL}_player_losses": "what_was_played_stays_and_what_is_left_is_played_once",
        },
        "the log is trimmed by force past a task's position": {
            f"{_UNIT}/test_task": "a_cursor_below_the_trim_point_fails_the_task"
            " records_that_are_trimmed_by_force_under_a_slow_task_fail_it",
        },
        "the file of one process has other targets": {
            f"{_UNIT}/test_member_mark": "processes_with_other_targets_count_for_no_share",
            f"{_UNIT}/test_members": "a_target_that_joins_later_begins_at_the_start"
            " processes_change_their_file_one_after_the_other",
            f"{_REAL}_player": "a_file_changes_one_process_after_the_other_under_load",
        },
        "the file of one process has another number of partitions": {
            f"{_UNIT}/test_members": "another_number_of_partitions_ends_the_player",
            f"{_REAL}_player": "other_partitions_are_refused",
        },
        "an operator deletes a cursor": {
            f"{_UNIT}/test_task_cursor":
                "a_deleted_cursor_is_created_again_and_its_target_refuses_it",
        },
        "the wall clock jumps": {f"{_REAL}_player_clocks": "the_wall_clock_may_jump"},
        "an unknown key, kind or setting": {
            f"{_UNIT}/test_config": "what_cannot_work_is_refused",
            f"{_TARGETS}_settings": "unknown_setting_is_refused_with_the_closest_name",
        },
        "`metrics` in `[player]`": {f"{_UNIT}/test_config": "what_cannot_work_is_refused"},
        "no target, two targets of one name, an invalid name, more than 256 tasks": {
            f"{_UNIT}/test_config":
                "what_cannot_work_is_refused a_player_has_at_most_256_tasks",
            f"{_TARGETS}_settings": "invalid_names_are_refused",
        },
        "`map` cannot be imported or called": {
            f"{_UNIT}/test_config": "what_cannot_work_is_refused",
        },
        "`map` raises an error, or returns something else than section 2 says": {
            f"{_UNIT}/test_selection": "a_map_that_returns_something_else_is_a_bug",
            f"{_UNIT}/test_task": "a_map_that_fails_fails_the_task",
        },
        "`map` does not return": {
            f"{_REAL}_player_stops": "a_map_that_does_not_return_does_not_hold_up_the_program",
        },
        "a parameter of `statement` is unknown": {
            f"{_TARGETS}_statement": "other_parameters_are_refused_with_a_list",
        },
        "`statement` does not fit the tables of the database": {
            f"{_TARGETS}_sqlite_target": "wrong_statement_is_reported_at_each_attempt"
            " check_finds_wrong_statements_and_unreachable_files",
        },
        "the target cannot be reached at the start": {
            f"{_TARGETS}_sql": "unreachable_database_is_a_reason_to_retry",
            f"{_REAL}_player": "check_names_the_target_that_it_cannot_use",
        },
        "records from `start` on were trimmed, and a cursor does not exist yet": {
            f"{_UNIT}/test_new_cursors":
                "a_start_that_was_trimmed_is_refused_while_a_cursor_is_missing",
            f"{_REAL}_player": "a_start_that_was_trimmed_is_refused",
        },
        "`start` is no position": {
            f"{_UNIT}/test_config":
                "what_cannot_work_is_refused a_start_that_is_no_position_is_refused",
        },
    },
}  # fmt: skip


def rows_of_page() -> dict[str, list[str]]:
    """Return the first cells of the page's tables of failures, by section."""
    page = (ROOT / "docs" / "player.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^## \d+\. ", page, flags=re.MULTILINE)[1:]:
        tables = re.findall(
            r"^\|[^|\n]+\| then \|\n\|---\|---\|\n((?:\|.*\n)+)", section, re.MULTILINE
        )
        rows = [
            line.split(" | ")[0].removeprefix("| ") for one in tables for line in one.splitlines()
        ]
        if rows:
            found[section.partition("\n")[0]] = rows
    return found


def test_every_failure_of_the_page_has_a_test() -> None:
    assert rows_of_page() == {section: list(rows) for section, rows in TESTED.items()}


@pytest.mark.parametrize("section", TESTED)
def test_every_named_test_exists(section: str) -> None:
    for modules in TESTED[section].values():
        assert modules
        for module, names in modules.items():
            for name in names.split():
                check_exists(f"{module}.py", f"test_{name}")
