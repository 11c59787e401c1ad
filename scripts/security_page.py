"""Writes tests/security/controls.md, and the table of boundaries in docs/security.md."""

# ruff: noqa: E501
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rolltap.harnesses.evaluators import registry

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
MUTATIONS = Path(__file__).parents[1] / "tests" / "security" / "mutations.json"
"""Of each control, the day on which its test failed without it (`python -m tests.security.mutate`)."""
CONTROLS_PAGE = Path(__file__).parents[1] / "tests" / "security" / "controls.md"
HEAD = """# Controls

Each with its tests, and the day on which they failed without it (`python -m tests.security.mutate`).
`python scripts/security_page.py` writes this page.

"""
BOUNDARIES, BOUNDARIES_END = "<!-- boundaries: scripts/security_page.py -->\n", "<!-- end of boundaries -->\n"


@dataclass(frozen=True, slots=True)
class Control:
    """A control, the tests that fail without it (`file::test`), and what is missing of it, if anything."""

    what: str
    tests: tuple[str, ...]
    missing: str = ""


CONTROLS = (
    Control(
        "a session's key has 256 random bits, is stored hashed, and dies with its session",
        ("unit/proxy/test_gateway.py::test_a_closed_session_is_refused_and_nothing_changes",
         "unit/proxy/test_gateway.py::test_an_expired_key_is_refused",
         "integration/test_service.py::test_a_zombies_late_results_change_nothing"),
    ),
    Control(
        "who calls follows from the key alone; a session in the URL must agree",
        ("unit/proxy/test_gateway.py::test_keys",
         "unit/proxy/test_vendors.py::test_who_knows_a_sessions_id_can_not_write_into_it"),
    ),
    Control(
        "three listeners, and every route of the trainer and admin planes has a rule for every kind of key",
        ("unit/proxy/test_access.py::test_every_route_has_a_rule_and_keeps_to_it_with_every_key",
         "unit/proxy/test_private.py::test_the_planes_describe_themselves_to_nobody"),
    ),
    Control(
        "keys are looked at before a body, and never found in `Host`",
        ("unit/proxy/test_front.py::test_a_body_is_not_taken_from_who_has_no_key",
         "unit/proxy/test_access.py::test_a_key_is_taken_from_the_bearer_header_only"),
    ),
    Control(
        "secrets are compared in constant time",
        ("unit/house/test_security.py::test_no_secret_is_compared_with_equals",),
    ),
    Control("SQL takes values by parameters only", ("unit/house/test_house.py::test_ruff_finds_nothing",)),
    Control(
        "no key can mint more than it has",
        ("contract/test_keys.py::test_no_key_grants_more_than_it_has",
         "contract/test_keys.py::test_a_runner_reaches_what_it_claimed_and_nothing_else",
         "unit/proxy/test_access.py::test_a_trainers_key_for_named_policies_reaches_no_other"),
    ),
    Control(
        "rewards name their key, are only appended, and are chained",
        ("unit/proxy/test_access.py::test_a_reward_names_its_key",
         "contract/test_rewards.py::test_the_database_refuses_to_change_a_reward",
         "contract/test_rewards.py::test_what_was_changed_without_the_triggers_is_found"),
    ),
    Control(
        "the agent plane reads nothing back but a session's own replies",
        ("unit/proxy/test_retrieval.py::test_only_the_own_session_reads_a_reply",
         "unit/proxy/test_vendor_reach.py::test_no_other_part_of_a_vendors_api_is_reached"),
    ),
    Control(
        "upstreams are the settings': no field, header or path of a request leads elsewhere",
        ("unit/proxy/test_vendor_reach.py::test_no_other_part_of_a_vendors_api_is_reached",
         "unit/proxy/test_vendor_reach.py::test_only_known_headers_go_to_a_vendor",
         "unit/proxy/test_weights_paths.py::test_only_paths_in_the_roots_are_pushed"),
    ),
    Control(
        "images are data URLs, or of a host that the settings name",
        ("unit/proxy/test_image_hosts.py::test_no_other_host_is_named_to_the_engine",),
    ),
    Control(
        "no redirect is followed with a key",
        ("unit/trainer_client/test_redirects.py::test_a_redirect_is_an_error_and_not_followed",),
    ),
    Control(
        "names in paths are plain",
        ("unit/proxy/test_vendor_reach.py::test_a_plain_name_reaches_the_vendor",
         "unit/proxy/test_vendor_reach.py::test_only_a_plain_name_takes_a_place_in_a_path"),
        "ids of tasks, groups and trainers are any text; none is a file's name",
    ),
    Control(
        "known headers only go to vendors; a body of ambiguous length is refused",
        ("unit/proxy/test_vendor_reach.py::test_only_known_headers_go_to_a_vendor",
         "unit/proxy/test_ambiguous.py::test_a_body_of_ambiguous_length_is_refused_and_nothing_after_it_is_read",
         "unit/proxy/test_ambiguous.py::test_a_coding_that_is_not_undone_is_refused_and_nothing_after_it_is_read"),
    ),
    Control(
        "compressed bodies are unpacked on the agent plane only, for known keys, up to the largest body",
        (
            "unit/proxy/test_content_encoding.py::test_a_bomb_is_refused_before_it_is_whole",
            "unit/proxy/test_content_encoding.py::test_nothing_is_decoded_for_an_unknown_key",
            "unit/proxy/test_ambiguous.py::test_a_compressed_body_is_not_unpacked",
        ),
    ),
    Control(
        "bodies, heads, headers and the calls, tokens, bytes and rate of a session and of a project's key have caps",
        ("unit/proxy/test_front.py::test_a_body_over_the_cap_is_refused_before_it_comes",
         "unit/proxy/test_front.py::test_a_head_has_a_largest_size_and_number_of_lines",
         "unit/proxy/test_budget.py::test_a_budget_ends_politely",
         "unit/proxy/test_key_budget.py::test_a_keys_budget_ends_politely_and_opens_no_more_sessions"),
    ),
    Control(
        "heads, bodies and silence have deadlines, planes and keys a number of connections",
        ("unit/proxy/test_front.py::test_a_slow_head_a_slow_body_and_silence_end",
         "unit/proxy/test_front.py::test_connections_beyond_the_limit_are_refused",
         "unit/proxy/test_front.py::test_connections_are_counted_per_key",
         "unit/proxy/test_front.py::test_who_has_no_key_fills_no_plane",
         "unit/proxy/test_front.py::test_a_stranger_rests_a_short_time"),
    ),
    Control("a vendor's key is in no record, log or error", ("unit/proxy/test_vendors.py::test_the_key_is_nowhere",)),
    Control(
        "tenants are apart: by row-level security on Postgres, in every table; on SQLite there is one",
        ("integration/test_tenants.py::test_no_route_shows_or_changes_what_is_another_tenants",
         "integration/test_tenants.py::test_the_agent_plane_knows_no_other_tenants_model_session_or_reply",
         "integration/test_tenants.py::test_sql_in_a_tenants_transaction_reaches_no_other_row",
         "integration/test_tenants.py::test_a_user_whom_the_wall_does_not_stop_is_refused",
         "unit/calllog/test_versions.py::test_a_migrated_database_separates_tenants_as_a_new_one"),
        "the viewer's pages and `/metrics` are the deployment's own",
    ),
    Control(
        "what is stored is never unpickled or evaluated",
        ("unit/engines/test_decode.py::test_arrays_are_never_unpickled",
         "unit/house/test_house.py::test_ruff_finds_nothing"),
    ),
    Control(
        "code that runs is named by admin keys only",
        ("unit/proxy/test_access.py::test_every_route_has_a_rule_and_keeps_to_it_with_every_key",),
        "a task with `kind = \"python\"` runs what it names on a node",
    ),
    Control(
        "loopback by default; elsewhere only with long keys of one's own, engines too; TLS where it is set",
        ("unit/proxy/test_front.py::test_away_from_loopback_keys_are_chosen_and_long",
         "unit/proxy/test_tls.py::test_every_plane_is_verified_by_its_certificate_and_silent_in_clear",
         "unit/proxy/test_front.py::test_a_web_page_does_not_reach_a_plane_on_loopback",
         "unit/proxy/test_private.py::test_an_engine_off_loopback_needs_a_key"),
    ),
    Control(
        "the sandbox reaches the proxy only, and takes no more than its share",
        ("unit/harnesses/test_bubblewrap.py::test_only_the_proxy_can_be_reached",
         "security/test_hostile_agent.py::test_an_agent_that_tries_everything_gains_nothing_and_is_counted",
         "unit/harnesses/test_hostile.py::test_a_run_takes_no_more_than_its_share",
         "unit/harnesses/test_hostile.py::test_calls_that_no_agent_needs_are_refused",
         "unit/harnesses/test_here.py::test_outside_the_sandbox_it_runs_when_that_was_said"),
    ),
    Control(
        "a Ray cluster on other machines needs tokens",
        ("unit/cli/test_mistakes.py::test_a_ray_cluster_on_other_machines_needs_tokens",),
    ),
    Control(
        "the wheel holds what git holds; dependencies are pinned and above known advisories",
        ("unit/house/test_packaging.py::test_the_wheel_holds_every_tracked_file",
         "unit/house/test_security.py::test_pins_are_above_known_advisories",
         "unit/house/test_supply_chain.py::test_the_locks_hold_the_tested_pins_with_hashes"),
        "base images are named by tag; `make audit` knows nothing where the advisory data can't be reached",
    ),
    Control(
        "what an agent wrote is parsed by a process with limits and without keys, never in the runner",
        ("unit/untrusted/test_readers.py::test_what_a_file_does_to_its_reader_is_an_error_for_the_runner",
         "security/test_left_files.py::test_a_log_that_grows_when_it_is_decoded_has_a_problem",
         "security/test_patterns.py::test_every_pattern_is_linear",
         "unit/calllog/test_prompts.py::test_prompts_that_branch_have_a_largest_size",
         "unit/reading/test_unreadable.py::test_a_session_that_is_too_large_ends_with_a_finding"),
    ),
    Control(
        "pages run our scripts only, and links to them work once",
        ("unit/viewer/test_pages.py::test_pages_need_a_link_that_works_once",
         "unit/viewer/test_pages.py::test_a_used_link_stays_used_after_a_restart_and_in_every_process"),
    ),
    Control(
        "what a file brings into the record passes the API's checks",
        ("unit/exporters/test_import.py::test_a_trace_that_cannot_be_read_is_named_and_nothing_is_written",
         "unit/exporters/test_import.py::test_no_key_opens_an_imported_session",
         "unit/calllog/test_transfer.py::test_an_archive_brings_nothing_that_the_api_would_refuse",
         "unit/exporters/test_import.py::test_an_archive_takes_no_traces_place"),
    ),
    Control(
        "all that a connection sends is counted: heads, bodies, framing",
        ("unit/proxy/test_front.py::test_what_is_neither_head_nor_body_has_a_limit",
         "unit/proxy/test_front.py::test_a_body_that_nobody_reads_is_not_taken"),
    ),
    Control(
        "in a person's folder an agent writes nowhere where the person's tools run programs",
        ("unit/harnesses/test_here.py::test_an_agent_writes_nowhere_where_a_persons_tools_run_programs",),
        "repositories that it makes in inner folders",
    ),
    Control(
        "a sandbox shows programs and what they import, never HOME or keys",
        ("unit/harnesses/test_install.py::test_a_sandbox_refuses_to_show_a_persons_folder",
         "unit/harnesses/test_install.py::test_of_a_persons_own_installation_the_sandbox_shows_what_it_needs"),
    ),
    Control(
        "disk and memory are counted as the kernel keeps them; root's nodes give each run a file system",
        ("unit/harnesses/test_hostile.py::test_a_run_takes_no_more_than_its_share",
         "unit/harnesses/test_disk.py::test_a_runs_files_have_a_size_in_all"),
        "elsewhere a run may exceed its limits until the watchdog's next look",
    ),
    Control(
        "a harness's database runs no SQL of its own",
        ("contract/test_harness_logs.py::test_a_database_that_would_run_sql_of_its_own_is_refused",),
    ),
    Control(
        "code under evaluation, run by the helper, reaches neither the evaluator's program nor its reward",
        ("unit/harnesses/test_code_sandbox.py::test_code_under_test_writes_no_reward",
         "unit/harnesses/test_containers.py::test_code_under_test_gets_a_container_beside_the_judges",
         "security/test_boundaries.py::test_code_of_the_working_copy_reaches_what_the_table_says"),
        "code that the program starts in another way (`unprotected`); Harbor's own trials",
    ),
    Control(
        "links of a working copy lead an evaluator nowhere but into it and the system",
        ("unit/harnesses/test_code_sandbox.py::test_links_are_kept_in_the_copy_and_in_the_system_only",
         "unit/harnesses/test_code_sandbox.py::test_a_python_check_reads_no_file_of_the_machine_by_a_link"),
    ),
    Control(
        "an evaluator sees of the agent's changes what an allow-list or its `takes` brings: no configuration, no script",
        ("security/test_configuration.py::test_planted_configuration_changes_no_reward",
         "security/test_configuration.py::test_no_configuration_comes_in_at_any_depth",
         "unit/harnesses/test_code_sandbox.py::test_with_takes_only_named_changes_count"),
    ),
    Control(
        "a reward that is a link is none",
        ("unit/harnesses/test_code_sandbox.py::test_a_link_that_the_verifier_left_is_no_reward",
         "unit/harnesses/test_evaluators.py::test_links_that_an_agent_left_lead_no_evaluator_out"),
    ),
    Control(
        "a sandbox makes no user namespace, by whichever call",
        ("unit/harnesses/test_bubblewrap.py::test_no_user_namespace_can_be_made_by_any_call",),
    ),
    Control(
        "what an agent left is opened and listed by one helper, which follows no link",
        ("unit/house/test_left_files.py::test_no_other_way_leads_into_what_an_agent_left",),
    ),
    Control(
        "an agent that makes its own evaluation fail is worth 0 and counted",
        ("security/test_failing_evaluations.py::test_who_breaks_its_evaluation_gets_nothing_and_is_counted",),
        "failures that the task's own files have, too",
    ),
    Control(
        "code that makes up the results of its tests is worth 0 and counted",
        ("security/test_forged_results.py::test_made_up_results_are_found",
         "security/test_forged_results.py::test_code_that_ends_a_decoys_run_gets_no_reward"),
        "code that knows a decoy by its text: the next rows",
    ),
    Control(
        "a judge that starts anything that may be the agent's is `unprotected`",
        ("security/test_judge_text.py::test_what_may_be_the_agents_is_not_known",
         "security/test_judge_text.py::test_what_loads_or_runs_the_agents_is_not_known",
         "unit/harnesses/test_code_sandbox.py::test_a_judge_that_starts_what_may_be_the_agents_is_unprotected"),
        "what a program of the judge loads itself",
    ),
    Control(
        "code that knows how decoys are made, and makes up all other results, is worth 0 and counted",
        ("security/test_forged_results.py::test_code_that_knows_how_decoys_are_made_is_found",
         "security/test_forged_results.py::test_code_that_knows_how_decoys_are_made_is_found_in_tests_without_literals",
         "security/test_forged_results.py::test_code_that_reads_what_a_test_wants_is_found",
         "security/test_quiet_decoys.py::test_a_quiet_decoy_has_another_expectation_and_nothing_else"),
        "code that knows the tests' own text, or takes an expectation for unlikely",
    ),
    Control(
        "a judge that makes a program, an option or a pattern of what the agent wrote is `unprotected`",
        ("security/test_judge_text.py::test_what_makes_a_program_of_the_agents_text_is_not_known",
         "security/test_judge_text.py::test_what_computes_a_variable_of_the_agents_is_not_known",
         "security/test_judge_text.py::test_who_names_files_by_a_pattern_reads_options_too"),
        "what a program of the judge does with the text",
    ),
    Control(
        "who gets no reward, as undone work gets none, counts 0 in the baseline",
        ("security/test_failing_evaluations.py::test_work_without_a_reward_counts_nothing_in_the_baseline",),
        "a judge that can't run",
    ),
    Control(
        "an environment's driver imports nothing that a model's tools wrote",
        ("unit/harnesses/test_environments.py::test_what_a_models_command_writes_is_not_imported",),
        "code in the driver's own process",
    ),
    Control(
        "tests pass beside their decoys, too: no clock, number or dice tells which run, or test, is one",
        ("security/test_forged_results.py::test_code_that_makes_up_results_in_some_runs_gets_nothing",
         "security/test_forged_results.py::test_code_that_makes_up_results_in_its_first_run_only_gets_nothing",
         "security/test_forged_results.py::test_in_sandboxes_the_tests_run_again_beside_their_decoys"),
        "two runs that signal each other, by locks of shared files or the page cache",
    ),
    Control(
        "code leaves no test out, by skipping it or expecting it to fail",
        ("security/test_forged_results.py::test_code_leaves_no_test_out",),
    ),
    Control(
        "code that loses tests, or some parameters, gets nothing; also of a file that needs the agent's work",
        ("security/test_forged_results.py::test_code_that_loses_tests_gets_nothing",
         "security/test_forged_results.py::test_code_that_loses_some_parameters_gets_nothing",
         "security/test_forged_results.py::test_a_skeleton_has_no_test_that_honest_work_leaves_out"),
        "of such a file: tests that are generated or inherited, and all if it skips some by its fixtures or as a whole",
    ),
    Control(
        "a test that has no result with another expectation is a failed evaluation",
        ("security/test_forged_results.py::test_code_that_loses_what_fails_gets_no_reward_for_tests_without_a_count",),
    ),
    Control(
        "no link comes into a clean copy that is not a link when it is asked for, whatever code swaps meanwhile",
        ("unit/harnesses/test_changes.py::test_a_link_that_takes_a_files_place_meanwhile_is_not_carried",),
    ),
    Control(
        "who changes the file that its work is compared with is `unprotected`",
        ("security/test_changed_expectations.py::test_who_changes_both_sides_of_a_comparison_is_not_trusted",
         "security/test_changed_expectations.py::test_who_changes_both_sides_in_another_folder_is_not_trusted",
         "security/test_changed_expectations.py::test_who_removes_what_is_expected_is_not_trusted",
         "security/test_changed_expectations.py::test_who_changes_what_is_expected_by_its_name_is_not_trusted",
         "security/test_changed_expectations.py::test_its_reward_is_unprotected"),
        "where the task's own file is the only one that is changed, and its name says nothing",
    ),
    Control(
        "in a person's folder an agent writes no program, hook or file that the person's git is told to use",
        ("unit/harnesses/test_here.py::test_an_agent_writes_nowhere_where_a_persons_git_is_told_to_look",),
        "what such a program loads",
    ),
    Control(
        "each file system in memory that a sandbox can write to has a size and counts, and so do file names and threads",
        ("unit/harnesses/test_hostile.py::test_no_place_of_a_sandbox_takes_more_memory_than_it_may",
         "unit/harnesses/test_hostile.py::test_no_kind_of_memory_is_without_a_limit",
         "unit/harnesses/test_hostile.py::test_the_filter_of_each_machine_refuses_its_own_numbers_only"),
        "what lies in sockets, without a cgroup; the user's limits, such as that of inotify instances, are one for all runs",
    ),
    Control(
        "no link of an agent leads what a judge writes to its reward file",
        ("unit/harnesses/test_code_sandbox.py::test_what_a_judge_writes_to_another_file_is_no_reward",
         "unit/harnesses/test_code_sandbox.py::test_where_links_lead_is_known_without_following_them"),
    ),
    Control(
        "no daemon outlives its run, also one that emptied or overwrote its environment",
        ("unit/harnesses/test_hostile.py::test_no_daemon_of_a_run_outlives_it",),
        "in `process`, root's that raises its limits as well",
    ),
    Control(
        "slow work on an agent's files, however much, delays no heartbeat and takes no time of others' evaluations",
        ("unit/harnesses/test_node.py::test_slow_work_on_agents_files_delays_no_heartbeat",
         "unit/harnesses/test_node.py::test_work_on_agents_files_has_threads_of_its_own",
         "unit/harnesses/test_changes.py::test_others_run_while_very_many_paths_are_put_in_order",
         "unit/harnesses/test_evaluators.py::test_the_results_of_tests_wait_for_no_agents_workspace"),
        "others' ends and set-ups may wait",
    ),
    Control(
        "what was found about a rollout stays, whatever names an agent gives its files",
        ("unit/harnesses/test_evaluators.py::test_what_was_found_stays_in_a_detail_that_is_too_large",),
    ),
    Control(
        "a sandbox that root runs changes no setting of the kernel and no device of the machine",
        ("security/test_machine_files.py::test_no_setting_of_the_kernel_can_be_written",
         "security/test_machine_files.py::test_no_device_of_the_machine_is_changed"),
        "devices, where root may make none",
    ),
    Control(
        "a request's time grows with its size, whatever it holds many of",
        ("unit/proxy/test_request_time.py::test_a_requests_time_grows_with_its_size",
         "unit/proxy/test_front.py::test_many_small_chunks_are_handed_on_together"),
    ),
    Control(
        "a judge whose tool takes patterns or names of files from what the agent wrote is `unprotected`",
        ("security/test_judge_text.py::test_what_loads_or_runs_the_agents_is_not_known",),
    ),
    Control(
        "of a judge that the documentation shows, code that prints every answer gets nothing",
        ("security/test_documented_judges.py::test_who_prints_every_answer_gets_nothing",),
        "judges of others, that search the output",
    ),
    Control(
        "a removed folder stays removed, also if work on it goes on",
        ("security/test_removed_folders.py::test_work_that_goes_on_brings_no_removed_folder_back",
         "security/test_removed_folders.py::test_a_folder_is_removed_while_files_come_in"),
    ),
    Control(
        "an archive has in each column what the column is for, and JSON and arrays that readers can read",
        ("unit/calllog/test_transfer.py::test_an_archive_has_in_each_column_what_the_column_is_for",
         "unit/calllog/test_transfer.py::test_annotations_of_an_archive_count_what_their_call_has",
         "unit/calllog/test_transfer.py::test_no_call_of_an_archive_holds_what_readers_can_not_read",
         "unit/calllog/test_transfer.py::test_a_record_that_no_writer_makes_is_refused"),
        "a session of up to `--session-mb` is read whole, by the command that imports it",
    ),
    Control(
        "no key opens a session that an archive brings",
        ("unit/calllog/test_transfer.py::test_no_key_opens_a_session_of_an_archive",),
    ),
    Control(
        "the proxy and the database read the same tenant in a session's tags",
        ("unit/calllog/test_transfer.py::test_an_archive_brings_nothing_that_the_api_would_refuse",),
    ),
    Control(
        "a row that can't be read, or a value that no column or index holds, keeps no list, page or call from the others",
        ("unit/calllog/test_transfer.py::test_a_list_shows_the_other_calls_when_one_can_not_be_read",
         "unit/reading/test_unreadable.py::test_a_row_that_can_not_be_read_keeps_no_list_from_the_others",
         "unit/reading/test_unreadable.py::test_a_number_that_no_call_has_is_capped_or_unknown",
         "unit/reading/test_unreadable.py::test_a_reply_that_can_not_be_read_is_text",
         "unit/reading/test_unreadable.py::test_a_request_that_can_not_be_read_has_no_messages",
         "contract/test_calllog.py::test_a_text_that_no_index_can_hold_is_refused_alone",
         "integration/test_tenants.py::test_a_text_that_no_index_can_hold_is_refused_and_delays_nobody"),
    ),
    Control(
        "an agent that ran in a container does not end as the engine does that couldn't run it",
        ("unit/harnesses/test_containers.py::test_an_agent_that_ran_is_no_failure_of_the_engine",),
    ),
    Control(
        "a run's output is read by its descriptor, whatever the run put in its place",
        ("unit/harnesses/test_runner.py::test_what_an_agent_leaves_changes_no_verdict_and_stays_nowhere",),
    ),
    Control(
        "tenants import the same file, and neither learns of the other",
        ("unit/exporters/test_import.py::test_tenants_import_the_same_file",),
    ),
    Control(
        "an orphan that lowers its limits to those of no run is ended with its run",
        ("unit/harnesses/test_hostile.py::test_no_daemon_of_a_run_outlives_it",
         "unit/harnesses/test_hostile.py::test_an_orphan_of_another_runners_run_is_left_to_it"),
    ),
    Control(
        "no debugger tells the first process of a sandbox to outlive its run",
        ("unit/harnesses/test_hostile.py::test_no_daemon_of_a_run_outlives_it",
         "unit/harnesses/test_hostile.py::test_the_filter_of_each_machine_refuses_its_own_numbers_only"),
        "machines without a filter of system calls (neither x86-64 nor arm64)",
    ),
    Control(
        "what forks and ends at once does not outlive its run",
        ("unit/harnesses/test_hostile.py::test_no_process_escapes_by_forking",),
        "in `process`, without a cgroup: by chance, one among very many",
    ),
    Control(
        "files that root's agent made immutable are removed with its run",
        ("security/test_removed_folders.py::test_what_can_not_be_changed_is_removed",),
    ),
    Control(
        "an agent changes no module whose name says that tests use it",
        ("security/test_what_tests_use.py::test_names_of_what_tests_use",
         "security/test_what_tests_use.py::test_an_agent_changes_no_assertion_that_tests_use"),
        "modules under other names: row 97",
    ),
    Control(
        "no new module of the agent's is an installed one for a Python that a test starts",
        ("security/test_what_tests_use.py::test_no_new_module_is_an_installed_one_for_a_python_that_a_test_starts",),
    ),
    Control(
        "new files push no change of the task's files out of what a judge model sees",
        ("unit/harnesses/test_evaluators.py::test_new_files_push_no_change_of_the_tasks_out",),
    ),
    Control(
        "code that skips a set-up, a fixture or a helper which asserts for a test is worth 0 and counted",
        ("security/test_skipped_parts.py::test_code_that_skips_a_part_of_a_test_is_found",
         "security/test_skipped_parts.py::test_only_tests_that_surely_run_a_part_must_fail"),
        "parts that a test may leave out",
    ),
    Control(
        "a reply outside of a game's action space is no action",
        ("security/test_games.py::test_what_is_no_action_of_a_game_pays_nothing",),
        "OpenEnv's games, which check their own; `Text` spaces",
    ),
    Control(
        "tests of which none asserts anything itself, or none but how programs exit, are `unprotected`",
        ("security/test_what_tests_use.py::test_tests_that_assert_nothing_themselves_are_not_trusted",
         "security/test_what_tests_use.py::test_tests_that_look_at_exit_codes_only_are_not_trusted"),
        "those beside a test that does",
    ),
    Control(
        "a library's equality that never fails (`numpy.testing`) is found",
        ("security/test_skipped_parts.py::test_code_that_skips_a_part_of_a_test_is_found",),
        "its other assertions",
    ),
    Control(
        "limits count what leaves its run's session and parents, too",
        ("unit/harnesses/test_hostile.py::test_a_run_takes_no_more_than_its_share",),
        "in `process`, what changes its limits: it is ended with its run",
    ),
    Control(
        "a judge with nothing that decides but the code under evaluation is `unprotected`",
        ("security/test_judge_text.py::test_a_judge_with_nothing_that_decides_is_known",
         "unit/harnesses/test_code_sandbox.py::test_a_judge_that_only_passes_an_exit_code_on_is_unprotected"),
        "an exit code that is compared: row 94",
    ),
    Control(
        "an agent's text in a judge's prompt has no control token of any model",
        ("unit/harnesses/test_control_tokens.py::test_an_agent_ends_no_message_of_its_judge",
         "unit/harnesses/test_control_tokens.py::test_no_control_token_stays_in_one_piece",
         "unit/harnesses/test_control_tokens.py::test_what_is_shown_is_one_text_of_the_agents"),
        "judges of others, that put the agent's text in a prompt themselves",
    ),
    Control(
        "an evaluator that gives no reward that the group waits for has failed: no group stays open for it",
        ("integration/test_roles.py::test_a_check_that_scores_roles_only_leaves_no_group_open",),
    ),
    Control(
        "what a killed runner left is ended by the next one of its user and machine, and nothing of a living one",
        ("unit/harnesses/test_containers.py::test_processes_of_a_killed_runner_are_ended_by_the_next",
         "unit/harnesses/test_containers.py::test_containers_of_a_killed_runner_are_removed_by_the_next"),
        "what a run started without its runner's identity in its environment",
    ),
    Control(
        "what ended as an engine's failures do is asked of the engine: one that died is told from an agent that says so",
        ("unit/harnesses/test_containers.py::test_an_engine_that_dies_under_an_agent_is_no_crash_of_the_agent",),
    ),
    Control(
        "a session of an archive has a largest size (`--session-mb`), packed and unpacked, and a call a largest number of tokens",
        ("unit/calllog/test_transfer.py::test_a_session_of_an_archive_has_a_largest_size_when_it_is_unpacked",
         "unit/calllog/test_transfer.py::test_a_call_of_an_archive_has_a_largest_number_of_tokens",
         "unit/calllog/test_transfer.py::test_an_import_takes_no_more_memory_than_a_session_may"),
    ),
    Control(
        "an archive adds nothing to a session that is in the store, unless it is said to be the store's own",
        ("unit/calllog/test_transfer.py::test_a_strangers_archive_adds_nothing_to_a_session_that_is_here",),
    ),
    Control(
        "an archive brings sessions of one tenant, which continue no other tenant's and refer to no part that is not in it",
        ("unit/calllog/test_transfer.py::test_an_archive_brings_no_session_to_another_tenant",
         "unit/calllog/test_transfer.py::test_a_fork_of_an_archive_continues_only_what_it_may",
         "unit/calllog/test_transfer.py::test_an_archive_refers_to_no_request_part_that_it_does_not_have"),
    ),
    Control(
        "a call of an archive has ids and numbers that readers can index, decode and add up",
        ("unit/calllog/test_transfer.py::test_no_call_of_an_archive_has_numbers_that_no_engine_has",
         "unit/calllog/test_transfer.py::test_an_id_of_an_archive_has_a_place_in_a_path"),
    ),
    Control(
        "a connection has few requests that wait for the replies to earlier ones",
        ("unit/proxy/test_front.py::test_who_sends_many_requests_before_their_replies_is_cut",),
    ),
    Control(
        "a page that is saved has a largest size, however many calls an agent makes",
        ("unit/viewer/test_pages.py::test_one_file_has_a_largest_size_however_many_calls_an_agent_makes",),
    ),
    Control(
        "an exit code that a judge's text compares, and a tool that only prints, decide nothing: `unprotected`",
        ("security/test_judge_text.py::test_a_judge_with_nothing_that_decides_is_known",),
        "an exit code that a checker's file compares, or that is printed and read back; a test runner's report",
    ),
    Control(
        "who changes a source file of the task with which the output of its work is compared is `unprotected`",
        ("security/test_changed_expectations.py::test_who_changes_what_its_output_is_compared_with_is_not_trusted",
         "security/test_changed_expectations.py::test_a_reward_for_what_the_agent_expects_is_unprotected"),
        "comparisons in a checker's file",
    ),
    Control(
        "code that skips a part of a test that stands in another of the task's files is worth 0 and counted",
        ("security/test_skipped_parts.py::test_code_that_skips_a_part_in_another_file_is_found",
         "security/test_skipped_parts.py::test_only_tests_that_surely_run_another_files_part_must_fail"),
        "code that knows these decoys by their text; parts of files that are not imported by name; fixtures of several tests",
    ),
    Control(
        "who changes a helper, base class or constant by which tests assert is `unprotected`",
        ("security/test_what_tests_use.py::test_who_changes_what_tests_assert_by_is_not_trusted",
         "security/test_what_tests_use.py::test_code_under_test_may_assert_and_have_constants"),
        "what a helper returns; files that tests read",
    ),
    Control(
        "a judge that only reads (`reads_only`) loads no module of the working copy; one that starts a program there is `unprotected`",
        ("security/test_reading_judges.py::test_a_judge_that_only_reads_loads_no_module_of_the_agents",
         "security/test_reading_judges.py::test_a_judge_that_starts_what_lies_among_the_agents_files_does_not_only_read"),
        "Python before 3.11; programs that are named without a path, as the task says that they only read",
    ),
    Control(
        "a judge that reads a program from its input, or starts one in a folder to which it or the agent may have written, is `unprotected`",
        ("security/test_judge_text.py::test_a_program_that_a_judge_reads_or_puts_somewhere_is_not_known",),
        "files beside a program of the judge's to which it writes by a tool's own option",
    ),
    Control(
        "code that loses tests which only a run counts (drawn values, fixtures' values, bases, loops, hooks) gets nothing",
        ("security/test_lost_tests.py::test_code_that_loses_tests_which_only_a_run_counts_gets_nothing",
         "security/test_lost_tests.py::test_files_whose_tests_are_counted_without_a_run"),
        "of a file that can't be imported without the agent's work",
    ),
    Control(
        "who removes a file by which tests assert, or puts a package in its place, is `unprotected`",
        ("security/test_what_tests_use.py::test_who_takes_the_place_of_what_tests_assert_by_is_not_trusted",),
    ),
    Control(
        "code that ends a test's loops, or replaces Python's functions for it, is worth 0 and counted",
        ("security/test_skipped_parts.py::test_a_replaced_name_of_pythons_makes_a_decoy_pass",
         "security/test_skipped_parts.py::test_code_that_ends_a_tests_loop_is_found"),
        "functions that tests replace themselves (`random`, `time`, `open`); code that knows these decoys by their text",
    ),
    Control(
        "no path of the agent's leads a judge, with or without a sandbox, to what it holds; where one may be left there is no verdict",
        ("security/test_reading_judges.py::test_no_path_of_the_agents_leads_to_what_a_judge_holds",
         "security/test_reading_judges.py::test_where_a_link_may_be_left_there_is_no_verdict",
         "security/test_reading_judges.py::test_a_folder_without_rights_keeps_no_link",
         "security/test_reading_judges.py::test_tests_read_nothing_outside_by_a_link_that_comes_in"),
        "in `process`: links that an agent with the runner's rights puts into the system's folders",
    ),
    Control(
        "what code leaves of its input is the judge's; a judge whose code can read the lines that the judge reads is `unprotected`",
        ("unit/harnesses/test_code_sandbox.py::test_code_that_reads_a_judges_cases_is_not_trusted",
         "unit/harnesses/test_code_sandbox.py::test_what_code_leaves_of_its_input_is_the_judges",
         "security/test_judge_text.py::test_code_that_can_read_a_judges_lines_is_known"),
        "lines that a checker's file reads: row 107",
    ),
    Control(
        "an agent that uses up the runner's files or threads ends no run's limits: a look that fails is followed by the next one",
        ("unit/harnesses/test_hostile.py::test_a_look_that_fails_ends_no_limit",
         "unit/harnesses/test_hostile.py::test_agents_that_hold_connections_leave_the_runner_files"),
    ),
    Control(
        "a judge that reads, writes or enters what a text of the agent's names is `unprotected`",
        ("security/test_reading_judges.py::test_a_judge_that_reads_what_the_agent_names_is_unprotected",
         "security/test_judge_text.py::test_a_judge_that_follows_a_name_of_the_agents_is_known",
         "security/test_judge_text.py::test_a_tool_that_follows_what_it_reads_is_known",
         "security/test_judge_text.py::test_a_judge_that_names_its_files_itself_follows_nothing"),
        "a checker's file, or more than one expression of an inline program, that opens what it reads",
    ),
    Control(
        "a judge that reads lines by any tool (`head`, `sed`, `awk`, `mapfile`, `cat`) from an input which its code has is `unprotected`",
        ("security/test_judge_text.py::test_code_that_can_read_a_judges_lines_is_known",
         "security/test_judge_text.py::test_code_with_an_input_of_its_own_shares_no_lines"),
        "a checker's file that reads its input",
    ),
    Control(
        "code that answers an order, member, type, distance or error as the test's own line says is worth 0 and counted",
        ("security/test_forged_results.py::test_code_that_reads_a_tests_own_line_is_found",
         "security/test_quiet_decoys.py::test_a_quiet_decoy_has_another_expectation_and_nothing_else"),
        "errors of the task's own; assertions in loops and branches",
    ),
    Control(
        "a judge, or tests, with a reference program that the code under evaluation can read or call is `unprotected`",
        ("security/test_changed_expectations.py::test_a_judge_whose_reference_the_code_can_read_is_unprotected",
         "security/test_what_tests_use.py::test_tests_by_a_reference_that_the_code_can_call_are_not_trusted"),
        "a reference whose name does not say so (`golden`, `reference`, `oracle`); answers in files of the working copy",
    ),
    Control(
        "results that code makes up hide no forged ones from decoys, and have a largest number",
        ("security/test_flooded_results.py::test_made_up_results_hide_no_forged_ones",
         "security/test_flooded_results.py::test_more_results_than_any_task_has_can_not_be_read"),
    ),
    Control(
        "the event loop is not late for the results that code makes up, however many names a task has",
        ("security/test_flooded_results.py::test_made_up_results_delay_nobody",),
    ),
    Control(
        "a row of the ingest stream that no proxy wrote is kept apart, and ends neither a start nor the writing of others",
        ("faults/test_odd_stream.py::test_odd_rows_of_the_stream_delay_no_others",),
    ),
    Control(
        "a handshake of TLS that does not end has a stranger's time",
        ("unit/proxy/test_tls.py::test_a_handshake_that_does_not_end_has_a_strangers_time",),
        "the number of such connections within that time",
    ),
    Control(
        "the files of a launch replace whatever an earlier run left in their places: links, pipes, second names, folders",
        ("unit/harnesses/test_definitions.py::test_files_of_a_launch_replace_whatever_an_earlier_run_left",),
    ),
    Control(
        "Harbor reads an agent's logs in an event loop of the trial's own, and none over 64 MB: it delays no heartbeat",
        ("unit/harnesses/test_threads.py::test_who_blocks_its_own_loop_delays_nobody",
         "harnesses/test_harbor.py::test_harbor_reads_no_logs_without_an_end"),
    ),
    Control(
        "a judge that takes the word of a test runner, or whose tools ask nothing of the agent's, is `unprotected`",
        ("security/test_judges_of_runners.py::test_what_a_test_runner_says_is_unprotected",
         "security/test_judges_of_runners.py::test_test_runners_are_known_by_the_commands_that_start_them",
         "security/test_judges_of_runners.py::test_a_judge_whose_tools_ask_nothing_of_the_agents_does_not_decide"),
        "runners of other names, and those that a script of the agent's starts",
    ),
    Control(
        "what bash computes for a judge, also in a mere assignment, has no value of the agent's",
        ("security/test_judges_of_runners.py::test_what_is_counted_of_the_agents_is_not_known",),
    ),
)  # fmt: skip


def controls() -> str:
    """The page of controls and holes."""
    shown = json.loads(MUTATIONS.read_text(encoding="utf-8"))
    lines = ["| # | control | its tests | failed without it on | not (yet) |", "|---|---|---|---|---|"]
    for number, control in enumerate(CONTROLS, 1):
        failed = shown.get(str(number), "not tried") or "no"
        lines.append(f"| {number} | {control.what} | {_named(control.tests)} | {failed} | {control.missing} |")
    lines += ["", "## Holes that were found and closed", "| | was | test |", "|---|---|---|"]
    lines += [f"| A{number} | {what} | {_named(tests)} |" for number, (what, *tests) in enumerate(HOLES, 1)]
    return HEAD + "\n".join(lines) + "\n"


def _named(tests: Iterable[str]) -> str:
    return "<br>".join(f"`{test.partition('::')[2]}`" for test in tests)


HOLES = (
    ("a session's key reached any path of a vendor", "unit/proxy/test_vendor_reach.py::test_no_other_part_of_a_vendors_api_is_reached"),
    ("an agent forged rewards by what it planted", "unit/harnesses/test_hostile.py::test_what_an_agent_plants_in_its_copy_forges_no_test"),
    ("without a sandbox agents ran unwalled, in silence", "unit/harnesses/test_hostile.py::test_without_a_sandbox_nothing_is_run_by_default"),
    ("bodies were read before the key was looked at", "unit/proxy/test_front.py::test_a_body_is_not_taken_from_who_has_no_key"),
    ("image URLs of clients reached the engine", "unit/proxy/test_image_hosts.py::test_no_other_host_is_named_to_the_engine"),
    ("who knew a session's id wrote into it", "unit/proxy/test_vendors.py::test_who_knows_a_sessions_id_can_not_write_into_it"),
    ("recorded text reached the terminal as it was", "unit/cli/test_screen.py::test_a_rollout_says_nothing_to_the_terminal"),
    ("limits of a sandbox did not hold", "unit/harnesses/test_hostile.py::test_a_run_takes_no_more_than_its_share"),
    ("weak keys off loopback; a readable data folder; texts without an end; any path pushed",
     "unit/proxy/test_front.py::test_away_from_loopback_keys_are_chosen_and_long",
     "unit/proxy/test_private.py::test_nobody_else_reads_the_data_folder",
     "unit/proxy/test_private.py::test_an_errors_message_has_an_end",
     "unit/proxy/test_weights_paths.py::test_only_paths_in_the_roots_are_pushed"),
)  # fmt: skip
"""Holes that were found and closed, each with the test that keeps it so."""


def boundaries() -> str:
    """What code of the working copy can reach, as Markdown: runtimes that are alike share a column, evaluators a row."""
    rows = registry.reach_table()
    columns: dict[tuple[str, ...], list[str]] = {}
    for runtime in next(iter(rows.values())):
        columns.setdefault(tuple(cells[runtime] for cells in rows.values()), []).append(runtime)
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind, cells in zip(rows, zip(*columns, strict=True), strict=True):
        alike.setdefault(cells, []).append(kind)
    heads = [", ".join(f"`{name}`" for name in runtimes) for runtimes in columns.values()]
    lines = [f"| evaluator | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {', '.join(f'`{kind}`' for kind in kinds)} | {' | '.join(cells)} |" for cells, kinds in alike.items()]
    meanings = [f"* {reach}: {meaning}" for reach, meaning in registry.REACH_MEANINGS.items()]
    return "\n".join([*lines, "", *meanings]) + "\n"


def page() -> str:
    """docs/security.md with its table as it is now."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(BOUNDARIES) + len(BOUNDARIES)] + boundaries() + text[text.index(BOUNDARIES_END) :]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CONTROLS_PAGE.write_text(controls(), encoding="utf-8")
