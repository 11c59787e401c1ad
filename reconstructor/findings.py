"""Findings: problems of a session by severity, reported before it is trained.

Findings depend only on the calls, so they are the same in the API, `rolltap sessions show`, exports and leases. They do
not mask anything: the rules do, and each mask is counted.

FATAL: the session, or the counted calls, cannot be trained. WARN: training may teach something wrong. INFO: worth
knowing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rolltap.reconstructor.kinds import KindRule
from rolltap.reconstructor.rules import MaskReason
from rolltap.types import (
    TEXT_FLAWS,
    TOOLS_NOT_SHOWN,
    UNCHECKED,
    Break,
    BreakReason,
    Call,
    CallKind,
    Classification,
    Finish,
    Flaw,
    Grade,
    LogCheck,
    LogVerdict,
    Outcome,
    SessionFinding,
)
from rolltap.wording import counted

POSITIVE = 1e-4
"""A greater value is not a log-prob: rounding errors are smaller."""

REFUSED_SHARE = 0.1
"""Share of refused calls above which they are a warning."""

UNAPPLIED: Mapping[str, tuple[str, str]] = {
    "tool_choice": ("tool_choice_not_forced", "asked for a tool call that is not forced: served as auto"),
    "reasoning_effort": (
        "effort_not_applied",
        "asked for an effort that the model's prompt does not have: its nearest, or none",
    ),
    "thinking_budget": ("thinking_budget_not_kept", "named a budget of thinking that the engine does not keep to"),
    "history_thinking": ("thinking_not_kept", "asked to keep or to drop earlier thinking, and the policy decides that"),
    "task_budget": ("task_budget_not_shown", "gave the model a token budget for its task, which it is not shown"),
    "context_management": (
        "history_not_edited",
        "asked the server to clear old tool results; the model sees the whole history",
    ),
    "tool_media": ("tool_media_not_shown", "have images of a tool in their history that the model was not shown"),
    "tool_document": ("tool_documents_not_shown", "have documents of a tool in their history, not shown to the model"),
    "tool_result_repeated": ("tool_results_repeated", "have a second result of one tool call in their history"),
    "tool_result_unmatched": ("tool_results_unmatched", "have a tool result without its call in their history"),
    "thinking": ("thinking_not_switched", "asked to think, or not to, and the model's prompt does not change by it"),
}
BREAKS: Mapping[BreakReason, tuple[str, str]] = {
    BreakReason.TOOLS_CHANGED: ("tools_changed", "offer other tools than the conversation before them"),
    BreakReason.SYSTEM_CHANGED: (
        "system_changed",
        "begin with another system text or effort than the conversation before them",
    ),
    BreakReason.TEMPLATE_NOT_BRIDGEABLE: ("template_changed", "were rendered anew: the template writes another prompt"),
}
JUDGED = (KindRule.REPLACES_HISTORY, KindRule.SIDE_BRANCH, KindRule.ASIDE)
"""The rules that judge a call's kind by the whole session."""

Test = Callable[[Call], bool]


def findings_of(
    calls: Sequence[Call],
    classifications: Sequence[Classification],
    breaks: Sequence[Break],
    log_check: LogCheck = UNCHECKED,
    origin: str = "",
) -> tuple[SessionFinding, ...]:
    """The findings of a session, the worst first. `classifications` has one entry for each of `calls`. `origin`: the
    call from which the session was forked."""
    kinds = {one.call_id: one.kind for one in classifications}
    agents = [call for call in calls if kinds[call.id] is CallKind.MAIN and call.outcome is not Outcome.REFUSED]
    replied = [call for call in agents if call.outcome is Outcome.COMPLETED]
    findings: list[SessionFinding] = []
    if log_check.verdict is LogVerdict.MISMATCH:
        text = f"calls of a session that its harness's own log does not confirm: {log_check.text}"
        findings.append(SessionFinding("log_mismatch", Grade.FATAL, len(calls), text))
    if origin and replied and not any(call.parent_id == origin for call in calls):
        text = f"calls, and none continues call {origin[-6:]}, from which the session was forked"
        findings.append(SessionFinding("fork_missed", Grade.WARN, len(replied), text))
    findings += [
        *_whole(replied, calls, trained=any(not each.mask for each in classifications)),
        *_endings(replied),
        *_last_reply(calls, classifications),
        *_tokens(replied),
        *_ends_of(calls),
        *_requests(agents),
        *_fitted(agents),
        *_breaks(breaks, kinds),
    ]
    return worst_first(findings)


def worst_first(findings: Iterable[SessionFinding]) -> tuple[SessionFinding, ...]:
    order = list(Grade)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.grade)))


def outside_store(servers: int) -> SessionFinding:
    """Of any session, while `servers` are cut off from the store."""
    text = f"{counted(servers, 'server')} may have calls that are not in the store yet"
    return SessionFinding("calls_outside_store", Grade.WARN, 0, text)


def _whole(replied: Sequence[Call], calls: Sequence[Call], *, trained: bool) -> Iterable[SessionFinding]:
    """An empty session, or one with hardly any replies."""
    if not calls:
        yield SessionFinding("no_call", Grade.WARN, 0, "the agent has made no call yet")
    elif not replied:
        yield SessionFinding("no_reply", Grade.FATAL, len(calls), "no call of the agent was answered")
    elif _are_text(replied):
        text = "replies are not trainable: the upstream returned no token ids"
        yield SessionFinding("text_only", Grade.INFO, len(replied), text)
    elif not trained:
        yield SessionFinding("nothing_trained", Grade.FATAL, len(replied), "every call is masked; the report says why")
    if len(replied) == 1 and replied[0].shape.tools:  # without tools, a question and its answer are a whole session
        yield SessionFinding("one_call", Grade.WARN, 1, "the agent made one call only: a degenerate rollout?")


def _are_text(replied: Sequence[Call]) -> bool:
    """Whether the upstream is one that returns text alone, as a vendor does: no reply has token ids."""
    return all(call.flaw in TEXT_FLAWS for call in replied)


def _endings(replied: Sequence[Call]) -> Iterable[SessionFinding]:
    """Bad endings of replies."""
    if not replied:
        return
    cut = [call for call in replied if call.finish is Finish.LENGTH]
    if cut:
        yield SessionFinding("turns_truncated", Grade.WARN, len(cut), "replies were cut off by the token limit")
    if unknown := [call for call in replied if call.remark]:
        text = f"replies ended for a reason that rolltap does not know: {unknown[0].remark}"
        yield SessionFinding("finish_unknown", Grade.WARN, len(unknown), text)
    if replied[-1].finish is Finish.LENGTH:
        yield SessionFinding("ended_at_output_cap", Grade.WARN, 1, "the last reply was cut off by the token limit")
    offered = [call for call in replied if call.shape.tools]
    if offered and not any(call.finish is Finish.TOOL_CALLS for call in offered):
        yield SessionFinding("no_tool_call", Grade.WARN, len(offered), "tools were offered, and none was called")


def _last_reply(calls: Sequence[Call], classifications: Sequence[Classification]) -> Iterable[SessionFinding]:
    """A last reply that was taken for a side call or a summary by what the session looks like: it may be an answer."""
    pairs = zip(calls, classifications, strict=True)
    last = next((judged for call, judged in reversed(list(pairs)) if call.outcome is Outcome.COMPLETED), None)
    if last is not None and last.mask in (MaskReason.AUXILIARY, MaskReason.SUMMARY) and last.rule in JUDGED:
        text = f"the session's last reply is masked as {last.mask}, by the rule {last.rule}"
        yield SessionFinding("last_reply_masked", Grade.INFO, 1, text)


def _tokens(replied: Sequence[Call]) -> Iterable[SessionFinding]:
    """Problems of the sampled tokens."""
    if _are_text(replied):
        return
    tests: Sequence[tuple[str, Grade, Test, str]] = (
        ("logprobs_positive", Grade.FATAL, _is_positive, "have log-probs above 0: they are not the sampler's"),
        ("logprobs_missing", Grade.FATAL, _lacks_logprobs, "have no log-probs, or not finite ones"),
        ("ids_unknown", Grade.FATAL, lambda call: call.flaw is Flaw.IDS_UNKNOWN, "have ids that no tokenizer knows"),
        ("images_unknown", Grade.FATAL, lambda call: call.flaw is Flaw.IMAGES_UNKNOWN, "show images at unknown places"),
        ("tokens_missing", Grade.FATAL, lambda call: call.flaw is Flaw.TOKENS_MISSING, "have no token ids"),
        ("version_unknown", Grade.WARN, lambda call: call.flaw is Flaw.VERSION_UNKNOWN, "have no weight version"),
        ("calls_unparsable", Grade.WARN, lambda call: call.flaw is Flaw.TOOL_CALL_UNPARSABLE, "hold a broken call"),
    )
    flaws = Counter(call.sampling_flaw for call in replied if call.sampling_flaw is not None)
    for flaw, count in sorted(flaws.items()):
        yield SessionFinding(flaw.value, Grade.WARN, count, "replies whose sampling no trainer can correct for")
    for name, grade, holds, text in tests:
        if count := sum(map(holds, replied)):
            yield SessionFinding(name, grade, count, f"replies {text}")


def _is_positive(call: Call) -> bool:
    return len(call.logprobs) > 0 and bool(np.nanmax(call.logprobs, initial=-np.inf) > POSITIVE)


def _lacks_logprobs(call: Call) -> bool:
    return call.flaw in (Flaw.LOGPROBS_MISSING, Flaw.LOGPROBS_NOT_FINITE)


def _ends_of(calls: Sequence[Call]) -> Iterable[SessionFinding]:
    """Calls without a usable reply."""
    refused = sum(call.outcome is Outcome.REFUSED for call in calls)
    failed = sum(call.outcome in (Outcome.ENGINE_ERROR, Outcome.ABORTED) for call in calls)
    if refused:
        grade = Grade.WARN if refused >= REFUSED_SHARE * len(calls) else Grade.INFO
        yield SessionFinding("calls_refused", grade, refused, f"of {len(calls)} requests were refused")
    if failed:
        yield SessionFinding("calls_failed", Grade.INFO, failed, "calls were aborted or failed in the engine")


def _requests(agents: Sequence[Call]) -> Iterable[SessionFinding]:
    """Requested options that were not applied."""
    for field, (name, text) in UNAPPLIED.items():
        if count := sum(field in call.shape.unapplied for call in agents):
            yield SessionFinding(name, Grade.INFO, count, f"calls {text}")


def _fitted(agents: Sequence[Call]) -> Iterable[SessionFinding]:
    """Conversations that were changed to fit the model's template."""
    rules = Counter(rule for call in agents for rule in call.shape.fitted if rule != TOOLS_NOT_SHOWN)
    if rules:
        counts = ", ".join(f"{rule} {count}" for rule, count in sorted(rules.items()))
        count = sum(any(rule in rules for rule in call.shape.fitted) for call in agents)
        yield SessionFinding("made_to_fit", Grade.INFO, count, f"calls were made to fit the model's template: {counts}")
    if count := sum(TOOLS_NOT_SHOWN in call.shape.fitted for call in agents):
        text = "calls offer tools that the model's template does not write: the model can't know them"
        yield SessionFinding("tools_not_shown", Grade.WARN, count, text)


def _breaks(breaks: Sequence[Break], kinds: Mapping[str, CallKind]) -> Iterable[SessionFinding]:
    """Tools or system text that changed during the agent's conversation."""
    for reason, (name, text) in BREAKS.items():
        if count := sum(each.reason is reason and kinds.get(each.call_id) is CallKind.MAIN for each in breaks):
            yield SessionFinding(name, Grade.INFO, count, f"calls {text}")
