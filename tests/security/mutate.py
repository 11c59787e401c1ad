"""Removes each control and shows that its test fails: `python -m tests.security.mutate [NUMBER...]`.

A mutant is a copy of the repository with one replacement. Its test passes in the copy as it is and fails in the mutant;
the day on which it failed, or null where it passed, goes to tests/security/mutations.json, from which
`scripts/security_page.py` takes its column. Numbers that are named are run again; without any, those that have no day.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ANSWERS = Path(__file__).parent / "mutations.json"
TESTS_FAILED = 1
"""pytest's exit code; a mutant that can't even be collected proves nothing."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Control `number` without `old`, which stands once in `file`; `test` is below tests/."""

    number: int
    file: str
    old: str
    new: str
    test: str


MUTANTS = (
    Mutant(1, "proxy/sessions/live_sessions.py", "    if session.closed_at is not None:\n        raise", "    if False:\n        raise",
           "unit/proxy/test_gateway.py::test_a_closed_session_is_refused_and_nothing_changes"),
    Mutant(2, "proxy/sessions/live_sessions.py", "if url_session_id is not None and url_session_id != session.id:", "if False:",
           "unit/proxy/test_gateway.py::test_keys"),
    Mutant(3, "proxy/front/access.py", "if caller.role not in roles:", "if False:",
           "unit/proxy/test_access.py::test_every_route_has_a_rule_and_keeps_to_it_with_every_key[trainer]"),
    Mutant(4, "proxy/front/gate.py", 'await self._admit(_key(scope["headers"]))', "pass",
           "unit/proxy/test_front.py::test_a_body_is_not_taken_from_who_has_no_key[admin]"),
    Mutant(5, "proxy/front/gate.py", "    return \"\"\n", "    return \"\"\n\n\ndef same(key: str, other: str) -> bool:\n    return key == other\n",
           "unit/house/test_security.py::test_no_secret_is_compared_with_equals"),
    Mutant(6, "src/rolltap/calllog/stats.py", "from __future__ import annotations\n",
           "from __future__ import annotations\n\n\ndef by_name(connection, name):\n"
           "    return connection.exec_driver_sql(f\"SELECT * FROM sessions WHERE id = '{name}'\")\n",
           "unit/house/test_house.py::test_ruff_finds_nothing"),
    Mutant(7, "src/rolltap/ledger/keys.py", "if by.expires_at is not None and (end is None", "if False and (end is None",
           "contract/test_keys.py::test_no_key_grants_more_than_it_has"),
    Mutant(8, "src/rolltap/ledger/schema.py", "append_only(rewards, until=_UNTIL)", "",
           "contract/test_rewards.py::test_the_database_refuses_to_change_a_reward"),
    Mutant(9, "proxy/engines/passthrough.py", 'if not _NAME.fullmatch(value) or ".." in value:', "if False:",
           "unit/proxy/test_vendor_reach.py::test_no_other_part_of_a_vendors_api_is_reached"),
    Mutant(10, "proxy/planes/policies.py", "if roots and not _lies_in(path, roots):", "if False:",
           "unit/proxy/test_weights_paths.py::test_only_paths_in_the_roots_are_pushed"),
    Mutant(11, "proxy/call/sources/chat.py", "if url := foreign_image(request, self.settings.image_hosts):",
           "if (url := foreign_image(request, self.settings.image_hosts)) and False:",
           "unit/proxy/test_image_hosts.py::test_no_other_host_is_named_to_the_engine"),
    Mutant(12, "src/rolltap/http_client.py", "allow_redirects=False", "allow_redirects=True",
           "unit/trainer_client/test_redirects.py::test_a_redirect_is_an_error_and_not_followed"),
    Mutant(13, "proxy/engines/passthrough.py", 'r"[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,199}"', 'r"[^/]+"',
           "unit/proxy/test_vendor_reach.py::test_only_a_plain_name_takes_a_place_in_a_path"),
    Mutant(14, "proxy/engines/passthrough.py", '"x-app"),', '"x-app", "x-"),',
           "unit/proxy/test_vendor_reach.py::test_only_known_headers_go_to_a_vendor"),
    Mutant(15, "proxy/call/http_exchange.py", "if size > limit:", "if False:",
           "unit/proxy/test_content_encoding.py::test_a_bomb_is_refused_before_it_is_whole[gzip]"),
    Mutant(16, "proxy/call/http_exchange.py", "if self.announced() > limit:", "if False:",
           "unit/proxy/test_front.py::test_a_body_over_the_cap_is_refused_before_it_comes"),
    Mutant(17, "proxy/front/connections.py", "connection.close_if_late(now())", "now()",
           "unit/proxy/test_front.py::test_a_slow_head_a_slow_body_and_silence_end"),
    Mutant(18, "proxy/engines/passthrough.py", "    def without_key(self, text: str) -> str:\n", "    def without_key(self, text: str) -> str:\n        return text\n\n    def _without_key(self, text: str) -> str:\n",
           "unit/proxy/test_vendors.py::test_the_key_is_nowhere"),
    Mutant(19, "src/rolltap/calllog/schema.py", "OR {own})", "OR true)",
           "integration/test_tenants.py::test_sql_in_a_tenants_transaction_reaches_no_other_row"),
    Mutant(20, "proxy/engines/decode.py", "allow_pickle=False", "allow_pickle=True",
           "unit/engines/test_decode.py::test_arrays_are_never_unpickled"),
    Mutant(21, "src/rolltap/contract/planes.py", '@post("/tasks", roles=ADMIN,', '@post("/tasks", roles=RUN,',
           "unit/proxy/test_access.py::test_every_route_has_a_rule_and_keeps_to_it_with_every_key[admin]"),
    Mutant(22, "proxy/front/exposure.py", "if len(key) < MIN_KEY or len(set(key)) < MIN_KINDS:", "if False:",
           "unit/proxy/test_front.py::test_away_from_loopback_keys_are_chosen_and_long"),
    Mutant(23, "harnesses/runtimes/bubblewrap.py", '("--unshare-all", "--unshare-user",', '("--unshare-all", "--share-net", "--unshare-user",',
           "unit/harnesses/test_bubblewrap.py::test_only_the_proxy_can_be_reached"),
    Mutant(24, "src/rolltap/cli/up.py", 'or os.environ.get("RAY_AUTH_MODE") == "token"', "or True",
           "unit/cli/test_mistakes.py::test_a_ray_cluster_on_other_machines_needs_tokens"),
    Mutant(25, "constraints.txt", "aiohttp==3.14.5", "aiohttp==3.14.2",
           "unit/house/test_security.py::test_pins_are_above_known_advisories"),
    Mutant(26, "src/rolltap/untrusted/server.py", "        resource.RLIMIT_AS: mapped + (limits.memory_mb << 20),\n", "",
           "unit/untrusted/test_readers.py::test_what_a_file_does_to_its_reader_is_an_error_for_the_runner[fill_memory]"),
    Mutant(27, "proxy/viewer/app.py", "script-src 'self';", "script-src 'self' 'unsafe-inline';",
           "unit/viewer/test_pages.py::test_pages_need_a_link_that_works_once"),
    Mutant(28, "src/rolltap/datasets/importing.py", "        check_tags(own, POLICY, (POLICY,))\n        check_sizes(tags := {", "        (tags := {",
           "unit/exporters/test_import.py::test_a_trace_that_cannot_be_read_is_named_and_nothing_is_written"),
    Mutant(29, "proxy/front/connections.py", "if self.framing_bytes > allowed or self.idle_framing_bytes > HEAD_BYTES:", "if False:",
           "unit/proxy/test_front.py::test_what_is_neither_head_nor_body_has_a_limit[a long extension]"),
    Mutant(30, "harnesses/runtimes/here.py", "mounts = await in_thread(mounts_of, self.folder)", "mounts = list(mounts_of(self.folder))[:0]",
           "unit/harnesses/test_here.py::test_an_agent_writes_nowhere_where_a_persons_tools_run_programs"),
    Mutant(31, "harnesses/runtimes/bubblewrap.py", "            check_shown(path)\n", "            pass\n",
           "unit/harnesses/test_install.py::test_a_sandbox_refuses_to_show_a_persons_folder"),
    Mutant(32, "harnesses/runtimes/watchdog.py", "if status.st_nlink or not stat.S_ISREG(status.st_mode):", "if True:",
           "unit/harnesses/test_hostile.py::test_a_run_takes_no_more_than_its_share[process-disk by deleted files]"),
    Mutant(33, "harnesses/logs/formats.py", "if not stored.issuperset(TABLES) or any(column[6] for column in columns):", "if False:",
           "contract/test_harness_logs.py::test_a_database_that_would_run_sql_of_its_own_is_refused"),
    Mutant(34, "harnesses/evaluators/programs.py", "CodeWork(place.agents.folder, copy.take_again)", "CodeWork(workspace.folder, copy.take_again)",
           "security/test_boundaries.py::test_code_of_the_working_copy_reaches_what_the_table_says[command-bubblewrap]"),
    Mutant(35, "harnesses/runtimes/folders.py", "if not target or not _stays(target, path, (PurePosixPath(workdir), *system)):", "if not target:",
           "unit/harnesses/test_code_sandbox.py::test_links_are_kept_in_the_copy_and_in_the_system_only"),
    Mutant(36, "harnesses/evaluators/intake.py", "return not is_link and self._is_plain(path)", "return True",
           "security/test_configuration.py::test_planted_configuration_changes_no_reward[make]"),
    Mutant(37, "harnesses/evaluators/rewards.py", "        file = LeftFiles(folder).open(path)\n", "        file = (folder / path).open('rb')\n",
           "unit/harnesses/test_code_sandbox.py::test_a_link_that_the_verifier_left_is_no_reward"),
    Mutant(38, "harnesses/runtimes/bubblewrap.py", '    *("--disable-userns", "--cap-drop",', '    *("--cap-drop",',
           "unit/harnesses/test_bubblewrap.py::test_no_user_namespace_can_be_made_by_any_call"),
    Mutant(39, "harnesses/evaluators/rewards.py", "        file = LeftFiles(folder).open(path)\n", "        file = (folder / path).open('rb')\n",
           "unit/house/test_left_files.py::test_no_other_way_leads_into_what_an_agent_left"),
    Mutant(40, "harnesses/runner/lifecycle.py", 'raise Unreadable(f"only what the agent left', 'raise EvaluatorFailed(f"only what the agent left',
           "security/test_failing_evaluations.py::test_who_breaks_its_evaluation_gets_nothing_and_is_counted[no program]"),
    Mutant(41, "harnesses/evaluators/pytest_check.py", "        if passing:\n            acts", "        if False:\n            acts",
           "security/test_forged_results.py::test_made_up_results_are_found[the report]"),
    Mutant(42, "harnesses/evaluators/programs.py", "is_clean=True, unknown=text.unknown, ", "is_clean=True, ",
           "unit/harnesses/test_code_sandbox.py::test_a_judge_that_starts_what_may_be_the_agents_is_unprotected"),
    Mutant(43, "harnesses/evaluators/pytest_check.py", "quiet, failed = await self._passing_quiet_decoys(evidence, results, left_out)", "quiet, failed = [], []",
           "security/test_forged_results.py::test_code_that_knows_how_decoys_are_made_is_found[the report]"),
    Mutant(44, "harnesses/evaluators/judge_text.py", "self._read_expansions(others)", "pass",
           "security/test_judge_text.py::test_what_makes_a_program_of_the_agents_text_is_not_known"),
    Mutant(45, "harnesses/runner/attempts.py", "nothing if isinstance(error, NoReward) else None", "None",
           "security/test_failing_evaluations.py::test_work_without_a_reward_counts_nothing_in_the_baseline[harbor]"),
    Mutant(46, "harnesses/agents/drivers/environment.py.txt", "sys.path.remove(", "str(",
           "unit/harnesses/test_environments.py::test_what_a_models_command_writes_is_not_imported[True]"),
    Mutant(47, "harnesses/evaluators/pytest_check.py", "failed = [test for test, ok in self._passed(unchanged, left_out).items() if not ok]", "failed = []",
           "security/test_forged_results.py::test_code_that_makes_up_results_in_its_first_run_only_gets_nothing"),
    Mutant(48, "harnesses/evaluators/pytest_check.py", "if without.get(node, False) is None}", "if True}",
           "security/test_forged_results.py::test_code_leaves_no_test_out[skips]"),
    Mutant(49, "harnesses/evaluators/pytest_check.py", "bare = await with_form(skeleton, SKELETON, missing)", "bare = {}",
           "security/test_forged_results.py::test_code_that_loses_tests_gets_nothing[their runs-True]"),
    Mutant(50, "harnesses/evaluators/pytest_check.py", "if lost and (", "if False and (",
           "security/test_forged_results.py::test_code_that_loses_what_fails_gets_no_reward_for_tests_without_a_count"),
    Mutant(51, "harnesses/left_files.py", "                if is_link:\n", "                if (after / change.path).is_symlink():\n",
           "unit/harnesses/test_changes.py::test_a_link_that_takes_a_files_place_meanwhile_is_not_carried"),
    Mutant(52, "harnesses/evaluators/programs.py", "if expectation := place.expectation or (", "if expectation := (",
           "security/test_changed_expectations.py::test_its_reward_is_unprotected"),
    Mutant(53, "harnesses/runtimes/shown.py", "for repository in repositories for path in _named_by_git", "for repository in repositories[:0] for path in _named_by_git",
           "unit/harnesses/test_here.py::test_an_agent_writes_nowhere_where_a_persons_git_is_told_to_look"),
    Mutant(54, "harnesses/runtimes/bubblewrap.py", '*WALLS, *size, "/", *SYSTEM]', "*WALLS, *SYSTEM]",
           "unit/harnesses/test_hostile.py::test_no_place_of_a_sandbox_takes_more_memory_than_it_may[run]"),
    Mutant(55, "harnesses/evaluators/command.py", "    return remove_links_to(", "    return [] and remove_links_to(",
           "unit/harnesses/test_code_sandbox.py::test_what_a_judge_writes_to_another_file_is_no_reward"),
    Mutant(56, "harnesses/runtimes/process.py", "limits, locks=locks_of(f\"{MARK}={self._mark}\".encode()))", "limits)",
           "unit/harnesses/test_hostile.py::test_no_daemon_of_a_run_outlives_it"),
    Mutant(57, "harnesses/threads.py", "run_in_executor(_THREADS, call)", "run_in_executor(None, call)",
           "unit/harnesses/test_node.py::test_slow_work_on_agents_files_delays_no_heartbeat"),
    Mutant(58, "harnesses/base.py", '        stored[name] = f"{sizes[name]:,} bytes are left out"\n', '        return {"left_out": "much"}\n',
           "unit/harnesses/test_evaluators.py::test_what_was_found_stays_in_a_detail_that_is_too_large"),
    Mutant(59, "harnesses/runtimes/bubblewrap.py", '"--remount-ro", "/proc"]', "]",
           "security/test_machine_files.py::test_no_setting_of_the_kernel_can_be_written"),
    Mutant(60, "proxy/continuation/canonical.py", "if (before := bisect(texts, at)) < len(texts):", "if (before := sum(place < at for place, _ in enumerate(message.parts))) < 0:",
           "unit/proxy/test_request_time.py::test_a_requests_time_grows_with_its_size[chat: images]"),
    Mutant(61, "harnesses/evaluators/judge_text.py", "self._start(named[1] or following or each)", "pass",
           "security/test_judge_text.py::test_what_loads_or_runs_the_agents_is_not_known"),
    Mutant(62, "README.md", "| diff - <(echo 2 42)", "| grep -qx '2 42'",
           "security/test_documented_judges.py::test_who_prints_every_answer_gets_nothing"),
    Mutant(63, "harnesses/left_files.py", "_make_folder(destination.parent, target)", "destination.parent.mkdir(parents=True, exist_ok=True)",
           "security/test_removed_folders.py::test_work_that_goes_on_brings_no_removed_folder_back"),
    Mutant(64, "src/rolltap/calllog/archive_block.py", "if problem := _problem(column, value):", "if (problem := _problem(column, value)) and False:",
           "unit/calllog/test_transfer.py::test_an_archive_has_in_each_column_what_the_column_is_for[annotations]"),
    Mutant(65, "src/rolltap/calllog/archive.py", "is_open = row[closed_at] is None and row[expires_at] > now", "is_open = False",
           "unit/calllog/test_transfer.py::test_no_key_opens_a_session_of_an_archive"),
    Mutant(66, "src/rolltap/calllog/archive_block.py", "if tenant != (named[1] if named else DEFAULT_TENANT):", "if False and named:",
           "unit/calllog/test_transfer.py::test_an_archive_brings_nothing_that_the_api_would_refuse"),
    Mutant(67, "src/rolltap/calllog/codec.py", "    *(msgspec.MsgspecError, AlignmentError, RequestError, RecordCorrupt),\n", "",
           "unit/calllog/test_transfer.py::test_a_list_shows_the_other_calls_when_one_can_not_be_read"),
    Mutant(68, "harnesses/runtimes/containers.py", "if code in ENGINE_FAILURES and self._state_of_tmp() == before:", "if code in ENGINE_FAILURES:",
           "unit/harnesses/test_containers.py::test_an_agent_that_ran_is_no_failure_of_the_engine"),
    Mutant(69, "harnesses/base.py", "        left_out = os.fstat(self.descriptor).st_size - limit", "        left_out = len(self.path.read_bytes()) - limit",
           "unit/harnesses/test_runner.py::test_what_an_agent_leaves_changes_no_verdict_and_stays_nowhere[a folder where its output was]"),
    Mutant(70, "src/rolltap/datasets/importing.py", 'digest = hashlib.sha256((_content(trace, id) + "".join(owner.values())).encode()).hexdigest()', "digest = hashlib.sha256(_content(trace, id).encode()).hexdigest()",
           "unit/exporters/test_import.py::test_tenants_import_the_same_file"),
    Mutant(71, "harnesses/runtimes/process.py", "yield from _orphans(hiding)", "pass",
           "unit/harnesses/test_hostile.py::test_no_daemon_of_a_run_outlives_it[process-other limits]"),
    Mutant(72, "harnesses/runtimes/bubblewrap.py", "    by_argument += _never_with(PTRACE[machine], FIRST_PROCESS)\n", "",
           "unit/harnesses/test_hostile.py::test_no_daemon_of_a_run_outlives_it[bubblewrap-a sandbox that does not end with its parent]"),
    Mutant(73, "harnesses/runtimes/process.py", "if quiet == QUIET or newest == before:", "if True:",
           "unit/harnesses/test_hostile.py::test_no_process_escapes_by_forking[os.setsid()]"),
    Mutant(74, "harnesses/left_files.py", '("find", place, *CHANGEABLE), removal', "removal",
           "security/test_removed_folders.py::test_what_can_not_be_changed_is_removed"),
    Mutant(75, "harnesses/evaluators/intake.py", "(ing|utils?|lib|suite|cases?|data|base|helpers?|support)?([_-].+)?", "(ing)?",
           "security/test_what_tests_use.py::test_names_of_what_tests_use"),
    Mutant(76, "harnesses/evaluators/pytest_check.py", "    if NEW[name] and PathFinder.find_spec(name):", "    if False:",
           "security/test_what_tests_use.py::test_no_new_module_is_an_installed_one_for_a_python_that_a_test_starts"),
    Mutant(77, "harnesses/evaluators/llm_judge.py", "if change.kind is not ChangeKind.ADDED}", "if False}",
           "unit/harnesses/test_evaluators.py::test_new_files_push_no_change_of_the_tasks_out"),
    Mutant(78, "harnesses/evaluators/pytest_check.py", "return passing if parts is None else parts", "return passing",
           "security/test_skipped_parts.py::test_code_that_skips_a_part_of_a_test_is_found[finaliser]"),
    Mutant(79, "harnesses/agents/drivers/rolltap_gymnasium.py.txt", "if not env.action_space.contains(action):", "if False:",
           "security/test_games.py::test_what_is_no_action_of_a_game_pays_nothing"),
    Mutant(80, "harnesses/evaluators/pytest_check.py", "return passing if asserting[1] else None", "return passing",
           "security/test_what_tests_use.py::test_tests_that_assert_nothing_themselves_are_not_trusted"),
    Mutant(81, "harnesses/evaluators/decoys.py", "if EQUALITY_OF_LIBRARIES.fullmatch(name_of(call.func)):", "if False:",
           "security/test_skipped_parts.py::test_code_that_skips_a_part_of_a_test_is_found[library]"),
    Mutant(82, "harnesses/runtimes/watchdog.py", ", *(self.numbers.get(number, ()) if number else ())", "",
           "unit/harnesses/test_hostile.py::test_a_run_takes_no_more_than_its_share[process-memory of orphans]"),
    Mutant(83, "harnesses/evaluators/programs.py", 'return "" if self.decides else UNDECIDED', 'return ""',
           "unit/harnesses/test_code_sandbox.py::test_a_judge_that_only_passes_an_exit_code_on_is_unprotected"),
    Mutant(84, "harnesses/evaluators/llm_judge.py", "files=without_control_tokens(files),", "files=files,",
           "unit/harnesses/test_control_tokens.py::test_an_agent_ends_no_message_of_its_judge"),
    Mutant(85, "harnesses/runner/attempts.py", "if own.isdisjoint(scopes):", "if False:",
           "integration/test_roles.py::test_a_check_that_scores_roles_only_leaves_no_group_open[one policy]"),
    Mutant(86, "harnesses/runtimes/left_runs.py", "return place == _place() and", "return False and",
           "unit/harnesses/test_containers.py::test_processes_of_a_killed_runner_are_ended_by_the_next"),
    Mutant(87, "harnesses/runtimes/containers.py", "is_lost = code in ENGINE_FAILURES and await self.has_lost_it()", "is_lost = False",
           "unit/harnesses/test_containers.py::test_an_engine_that_dies_under_an_agent_is_no_crash_of_the_agent"),
    Mutant(88, "src/rolltap/calllog/archive_block.py", "if size > most_bytes:", "if False:",
           "unit/calllog/test_transfer.py::test_a_session_of_an_archive_has_a_largest_size_when_it_is_unpacked"),
    Mutant(89, "src/rolltap/calllog/archive.py", "if changed and not is_new and not self._own:", "if False:",
           "unit/calllog/test_transfer.py::test_a_strangers_archive_adds_nothing_to_a_session_that_is_here"),
    Mutant(90, "src/rolltap/calllog/archive.py", "if not self._own and (tenant := tenant_of(session.tags)) != current_tenant():", 'if (tenant := ""):',
           "unit/calllog/test_transfer.py::test_an_archive_brings_no_session_to_another_tenant"),
    Mutant(91, "src/rolltap/calllog/archive_block.py", "        _check_values(block)\n", "",
           "unit/calllog/test_transfer.py::test_no_call_of_an_archive_has_numbers_that_no_engine_has"),
    Mutant(92, "proxy/front/connections.py", "if len(self.pipeline) >= PIPELINED:", "if False:",
           "unit/proxy/test_front.py::test_who_sends_many_requests_before_their_replies_is_cut[agent]"),
    Mutant(93, "proxy/viewer/one_file.py", "            if left <= 0:\n", "            if False:\n",
           "unit/viewer/test_pages.py::test_one_file_has_a_largest_size_however_many_calls_an_agent_makes"),
    Mutant(94, "harnesses/evaluators/judge_text.py", "is_own = _compares_own(others, arguments)", "is_own = False",
           "security/test_judge_text.py::test_a_judge_with_nothing_that_decides_is_known"),
    Mutant(95, "harnesses/evaluators/programs.py", '(await in_thread(copy.expectation) if copy else ""):', '"":',
           "security/test_changed_expectations.py::test_a_reward_for_what_the_agent_expects_is_unprotected"),
    Mutant(96, "harnesses/evaluators/pytest_check.py", "used = {path: text for path, text in place.used.items() if path in place.own}", "used = dict[str, str]()",
           "security/test_skipped_parts.py::test_code_that_skips_a_part_in_another_file_is_found[helper]"),
    Mutant(97, "harnesses/evaluators/pytest_check.py", "if changed := changed_expectation_of({**texts, **place.used}, functions, mine):", 'if changed := "":',
           "security/test_what_tests_use.py::test_who_changes_what_tests_assert_by_is_not_trusted"),
    Mutant(98, "harnesses/evaluators/programs.py", "(SAFE_PATH if place.is_clean or place.only_tools else {})", "(SAFE_PATH if place.is_clean else {})",
           "security/test_reading_judges.py::test_a_judge_that_only_reads_loads_no_module_of_the_agents[False]"),
    Mutant(99, "harnesses/evaluators/judge_text.py", ' or (each == "-" and DOCUMENT not in program)', "",
           "security/test_judge_text.py::test_a_program_that_a_judge_reads_or_puts_somewhere_is_not_known"),
    Mutant(100, "harnesses/evaluators/pytest_check.py", "if nodes == expected and not missing and counted:", "if nodes == expected and not missing:",
           "security/test_lost_tests.py::test_code_that_loses_tests_which_only_a_run_counts_gets_nothing[a hook]"),
    Mutant(101, "harnesses/evaluators/pytest_check.py", "mine = await in_thread(_changed_texts, place)", "mine = await in_thread(_texts, place.clean.folder, place.used.keys() - place.own)",
           "security/test_what_tests_use.py::test_who_takes_the_place_of_what_tests_assert_by_is_not_trusted"),
    Mutant(102, "harnesses/evaluators/decoys.py", "assert not [*range(1)]\n", "",
           "security/test_skipped_parts.py::test_code_that_ends_a_tests_loop_is_found[range]"),
    Mutant(103, "harnesses/runtimes/folders.py", "await in_thread(remove_all_traps, self.places, system)", "await in_thread(remove_all_traps, self.places, system) if self.interpreter else []",
           "security/test_reading_judges.py::test_where_a_link_may_be_left_there_is_no_verdict[deep-False]"),
    Mutant(104, "harnesses/evaluators/programs.py", "if self.shares_input:", "if False:",
           "unit/harnesses/test_code_sandbox.py::test_code_that_reads_a_judges_cases_is_not_trusted"),
    Mutant(105, "harnesses/runtimes/watchdog.py", "except (OSError, RuntimeError) as error:", "except ZeroDivisionError as error:",
           "unit/harnesses/test_hostile.py::test_a_look_that_fails_ends_no_limit"),
    Mutant(106, "harnesses/evaluators/programs.py", "    elif place.follows:\n", "    elif False:\n",
           "security/test_reading_judges.py::test_a_judge_that_reads_what_the_agent_names_is_unprotected"),
    Mutant(107, "harnesses/evaluators/judge_flow.py", "return head in TAKES_LINES and not operands(head, arguments)", "return False",
           "security/test_judge_text.py::test_code_that_can_read_a_judges_lines_is_known"),
    Mutant(108, "harnesses/evaluators/pytest_check.py", "for each in (texts, {}):", "for each in (texts,):",
           "security/test_forged_results.py::test_code_that_reads_a_tests_own_line_is_found[at least]"),
    Mutant(109, "harnesses/evaluators/programs.py", "        if self.reference:\n", "        if False:\n",
           "security/test_changed_expectations.py::test_a_judge_whose_reference_the_code_can_read_is_unprotected[reference.py]"),
    Mutant(110, "harnesses/evaluators/pytest_check.py", "for node, ok in results.items() if function_of(node) in functions}", "for node, ok in results.items()}",
           "security/test_flooded_results.py::test_made_up_results_hide_no_forged_ones"),
    Mutant(111, "harnesses/evaluators/named_tests.py", "return [name for end in (*ends, len(node)) if (name := node[:end]) in self._names]", "return [name for name in self._names if node == name or node.startswith((f\"{name}::\", f\"{name}[\"))]",
           "security/test_flooded_results.py::test_made_up_results_delay_nobody[of many names]"),
    Mutant(112, "src/rolltap/calllog/codec.py", "        _check_values(table, row)\n", "",
           "faults/test_odd_stream.py::test_odd_rows_of_the_stream_delay_no_others"),
    Mutant(113, "proxy/server.py", "handshake_s = STRANGER_S if tls else None", "handshake_s = None",
           "unit/proxy/test_tls.py::test_a_handshake_that_does_not_end_has_a_strangers_time"),
    Mutant(114, "harnesses/runtimes/folders.py", "            remove(target)\n            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)",
           "            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)",
           "unit/harnesses/test_definitions.py::test_files_of_a_launch_replace_whatever_an_earlier_run_left"),
    Mutant(115, "harnesses/threads.py", "        return await on_loop(loop, work)\n", "        return await work()\n",
           "unit/harnesses/test_threads.py::test_who_blocks_its_own_loop_delays_nobody"),
    Mutant(116, "harnesses/evaluators/programs.py", "if self.tests and self.decides:", "if False:",
           "security/test_judges_of_runners.py::test_what_a_test_runner_says_is_unprotected"),
    Mutant(117, "harnesses/evaluators/judge_text.py", "for word in every if COMPUTES", "for word in words if COMPUTES",
           "security/test_judges_of_runners.py::test_what_is_counted_of_the_agents_is_not_known"),
)  # fmt: skip


def copied(folder: Path) -> Path:
    """The tracked files of the repository as they are now, with the same virtual environment."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    copy = folder / "copy"
    for name in filter(None, map(os.fsdecode, names)):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


def outcome(copy: Path, test: str) -> int:
    """The exit code of pytest on one test in the copy."""
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"]
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, check=False).returncode


def fails_without(copy: Path, mutant: Mutant) -> bool | None:
    """Whether the mutant's test fails without the control; None, and a line, where that can't be told."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        print(f"{mutant.number} {mutant.old!r} does not stand once in {mutant.file}", flush=True)
        return None
    if outcome(copy, mutant.test) != 0:
        print(f"{mutant.number} {mutant.test} fails without any change", flush=True)
        return None
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = outcome(copy, mutant.test)
        if code not in (0, TESTS_FAILED):
            print(f"{mutant.number} {mutant.test} ended with {code}", flush=True)
            return None
        return code == TESTS_FAILED
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    answers = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
    wanted = {int(number) for number in sys.argv[1:]} or {
        each.number for each in MUTANTS if not answers.get(str(each.number))
    }
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder))
        for mutant in MUTANTS:
            if mutant.number in wanted and (failed := fails_without(copy, mutant)) is not None:
                answers[str(mutant.number)] = time.strftime("%Y-%m-%d") if failed else None
                ordered = dict(sorted(answers.items(), key=lambda each: int(each[0])))
                ANSWERS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
                print(f"{mutant.number} {answers[str(mutant.number)]} {mutant.test}", flush=True)
    sys.exit(not all(answers.values()))


if __name__ == "__main__":
    main()
