"""Writes the table of controls in docs/security.md: `python scripts/security_page.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- controls: scripts/security_page.py -->\n", "<!-- end of controls -->\n"


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
        ("unit/proxy/test_vendor_reach.py::test_a_plain_name_reaches_the_vendor",),
        "ids of tasks, groups and trainers are any text; none is a file's name",
    ),
    Control(
        "known headers only go to vendors",
        ("unit/proxy/test_vendor_reach.py::test_only_known_headers_go_to_a_vendor",),
        "ambiguous lengths are refused by llhttp; there is no corpus of ours",
    ),
    Control("compressed bodies are not unpacked", (), "by construction; no test of its own"),
    Control(
        "bodies, heads, headers and a session's calls, tokens, bytes and rate have caps",
        ("unit/proxy/test_front.py::test_a_body_over_the_cap_is_refused_before_it_comes",
         "unit/proxy/test_front.py::test_a_head_has_a_largest_size_and_number_of_lines",
         "unit/proxy/test_budget.py::test_a_budget_ends_politely"),
    ),
    Control(
        "heads, bodies and silence have deadlines, planes a number of connections",
        ("unit/proxy/test_front.py::test_a_slow_head_a_slow_body_and_silence_end",
         "unit/proxy/test_front.py::test_connections_beyond_the_limit_are_refused"),
        "connections are counted per plane, not per key",
    ),
    Control("a vendor's key is in no record, log or error", ("unit/proxy/test_vendors.py::test_the_key_is_nowhere",)),
    Control("tenants are apart", (), "there is one tenant: use a deployment for each"),
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
        "loopback by default; elsewhere only with long keys of one's own, engines too",
        ("unit/proxy/test_front.py::test_away_from_loopback_keys_are_chosen_and_long",
         "unit/proxy/test_front.py::test_a_web_page_does_not_reach_a_plane_on_loopback",
         "unit/proxy/test_private.py::test_an_engine_off_loopback_needs_a_key"),
    ),
    Control(
        "the sandbox reaches the proxy only, and takes no more than its share",
        ("unit/harnesses/test_bubblewrap.py::test_only_the_proxy_can_be_reached",
         "unit/harnesses/test_hostile.py::test_a_run_takes_no_more_than_its_share",
         "unit/harnesses/test_hostile.py::test_calls_that_no_agent_needs_are_refused",
         "unit/harnesses/test_here.py::test_outside_the_sandbox_it_runs_when_that_was_said"),
    ),
    Control("Ray's own ports want a token", (), "set `RAY_AUTH_MODE=token` yourself"),
    Control(
        "the wheel holds what git holds; dependencies are pinned and above known advisories",
        ("unit/house/test_packaging.py::test_the_wheel_holds_every_tracked_file",
         "unit/house/test_security.py::test_pins_are_above_known_advisories"),
        "base images are named by tag, `pip-audit` is not run",
    ),
)  # fmt: skip


def table() -> str:
    """The controls as Markdown."""
    lines = ["| # | control | tests that fail without it | not (yet) |", "|---|---|---|---|"]
    for number, control in enumerate(CONTROLS, 1):
        tests = "<br>".join(f"`{test.partition('::')[2]}`" for test in control.tests) or "none"
        lines.append(f"| {number} | {control.what} | {tests} | {control.missing} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with its table as it is now."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
