"""Rules that decide which calls carry loss. Users can switch them, and the counts show them by name.

The first `MaskReason` that holds, in the order of the enum, decides. The reasons of the first block cannot be switched
off: the harness never acted on such tokens, or they cannot be trained. The second block is a matter of method;
`Rules.mask` selects from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from rolltap.errors import ConfigError
from rolltap.token_masks import MASK_ROWS
from rolltap.types import (
    EVALUATION,
    PURPOSE_TAG,
    UNCHECKED,
    Call,
    CallKind,
    Finish,
    Flaw,
    LogCheck,
    LogVerdict,
    Outcome,
    SamplingFlaw,
    Session,
)


class MaskReason(StrEnum):
    """Why sampled tokens carry no loss, or `TRAINED`. `Trajectory.counts` counts each.

    `RULE` may hold for some tokens of a trained call; each of the others holds for all tokens of a call.
    """

    TRAINED = "trained"
    # Always masked.
    ORIGIN = "origin"  # sampled in the session from which this one was forked, and trained there
    ABORTED = "aborted"
    ENGINE_ERROR = "engine_error"
    REFUSED = "refused"
    TOKENS_MISSING = "tokens_missing"  # no token ids: passed through as text, or nothing was sampled
    IDS_UNKNOWN = "ids_unknown"  # ids that the policy's tokenizer does not have
    IMAGES_UNKNOWN = "images_unknown"  # its prompt shows images, and which ids stand for which is not on record
    UNDELIVERED = "undelivered"
    LOGPROBS_MISSING = "logprobs_missing"
    LOGPROBS_NOT_FINITE = "logprobs_not_finite"
    JUDGE = "judge"
    SIMULATOR = "simulator"
    OTHER_POLICY = "other_policy"
    LATE = "late"  # it came to the store after its rollout's end was settled
    EVALUATION = "evaluation"  # an evaluation session, which is never trained
    RULE = "rule"  # a rule of the session masks these tokens; of a call: all of them
    # Masked if `Rules.mask` contains them.
    ABANDONED = "abandoned"  # the harness asked again with the same prompt and continued with the other reply
    AUXILIARY = "auxiliary"  # a side call
    SUMMARY = "summary"  # a compaction's summary
    CONSTRAINED = "constrained"  # a grammar limited what could be sampled, to ids that are not on record
    LENGTH_TRUNCATED = "length_truncated"  # cut off by the token limit
    TOOL_CALL_UNPARSABLE = "tool_call_unparsable"
    VERSION_UNKNOWN = "version_unknown"  # the weight version of its tokens is not on record
    SAMPLING_TRUNCATED = "sampling_truncated"  # greedy, penalties, or truncated without a mask: cannot be replayed
    LOGPROBS_UNTEMPERED = "logprobs_untempered"  # the log-probs are not at the sampling temperature
    LOG_MISMATCH = "log_mismatch"  # the harness's own log differs from the record


SWITCHABLE = frozenset(
    {
        MaskReason.ABANDONED,
        MaskReason.AUXILIARY,
        MaskReason.SUMMARY,
        MaskReason.CONSTRAINED,
        MaskReason.LENGTH_TRUNCATED,
        MaskReason.TOOL_CALL_UNPARSABLE,
        MaskReason.VERSION_UNKNOWN,
        MaskReason.SAMPLING_TRUNCATED,
        MaskReason.LOGPROBS_UNTEMPERED,
        MaskReason.LOG_MISMATCH,
    }
)

_OUTCOMES = {
    Outcome.ABORTED: MaskReason.ABORTED,
    Outcome.ENGINE_ERROR: MaskReason.ENGINE_ERROR,
    Outcome.REFUSED: MaskReason.REFUSED,
}
_KINDS = {
    CallKind.JUDGE: MaskReason.JUDGE,
    CallKind.SIMULATOR: MaskReason.SIMULATOR,
}


@dataclass(frozen=True, slots=True)
class Rules:
    """The switchable rules. The defaults mask every doubtful call.

    `policy`: only this policy's calls are trained; None: those of every policy. `evaluation`: no call is trained.
    `log_check`: the session's; with a mismatch no call is trained unless that rule is off.
    """

    mask: frozenset[MaskReason] = SWITCHABLE
    policy: str | None = None
    evaluation: bool = False
    log_check: LogCheck = UNCHECKED

    def __post_init__(self) -> None:
        if fixed := sorted(self.mask - SWITCHABLE):
            raise ConfigError(f"rules {fixed} cannot be switched; switchable: {', '.join(sorted(SWITCHABLE))}")

    def train(self, *reasons: MaskReason | str) -> Rules:
        """A copy of these rules with the named ones switched off."""
        for reason in reasons:
            if reason not in set(SWITCHABLE):
                raise ConfigError(f"no rule {str(reason)!r}; switchable: {', '.join(sorted(SWITCHABLE))}")
        return replace(self, mask=self.mask - {MaskReason(reason) for reason in reasons})

    def mask_reason(self, call: Call, kind: CallKind, *, abandoned: bool) -> MaskReason:
        """The first reason why `call` of kind `kind` carries no loss, or `TRAINED`."""
        return self._always(call, kind) or self._by_choice(call, kind, abandoned=abandoned) or MaskReason.TRAINED

    def is_answer(self, call: Call, kind: CallKind) -> bool:
        """Whether the harness got a reply of the policy, as tokens or as text. One that was cut off, failed or did not
        arrive is no answer; nor are those of judges, simulated users and other policies, whatever their flaws."""
        is_own = not call.sampled_by and kind not in _KINDS and self.policy in (None, call.policy)
        has_text = len(call.output_ids) > 0 or call.flaw is Flaw.TOKENS_MISSING
        return is_own and has_text and call.outcome is Outcome.COMPLETED and call.delivered is not False

    def _always(self, call: Call, kind: CallKind) -> MaskReason | None:
        if call.sampled_by:
            return MaskReason.ORIGIN
        if spoiled := unusable(call):
            return spoiled
        if call.flaw is Flaw.LOGPROBS_MISSING or len(call.logprobs) != len(call.output_ids):
            return MaskReason.LOGPROBS_MISSING
        if call.flaw is Flaw.LOGPROBS_NOT_FINITE or not np.isfinite(call.logprobs).all():
            return MaskReason.LOGPROBS_NOT_FINITE
        if kind in _KINDS:
            return _KINDS[kind]
        if self.policy is not None and call.policy != self.policy:
            return MaskReason.OTHER_POLICY
        if self.evaluation:
            return MaskReason.EVALUATION
        return MaskReason.RULE if not call.unmasked.any() else None

    def _by_choice(self, call: Call, kind: CallKind, *, abandoned: bool) -> MaskReason | None:
        holds = {
            MaskReason.ABANDONED: abandoned,
            MaskReason.AUXILIARY: kind is CallKind.AUXILIARY,
            MaskReason.SUMMARY: kind is CallKind.SUMMARY,
            MaskReason.CONSTRAINED: call.shape.constrained and MASK_ROWS not in call.extras,
            MaskReason.LENGTH_TRUNCATED: call.finish is Finish.LENGTH,
            MaskReason.TOOL_CALL_UNPARSABLE: call.flaw is Flaw.TOOL_CALL_UNPARSABLE,
            MaskReason.VERSION_UNKNOWN: call.flaw is Flaw.VERSION_UNKNOWN or not call.versions,
            MaskReason.SAMPLING_TRUNCATED: call.sampling_flaw is SamplingFlaw.TRUNCATED,
            MaskReason.LOGPROBS_UNTEMPERED: call.sampling_flaw is SamplingFlaw.UNTEMPERED,
            MaskReason.LOG_MISMATCH: self.log_check.verdict is LogVerdict.MISMATCH,
        }
        return next((reason for reason, true in holds.items() if true and reason in self.mask), None)


def session_rules(session: Session, train: Iterable[MaskReason | str] = ()) -> Rules:
    """The rules for a session: only its own policy's calls, none of an evaluation; rules in `train` are off."""
    evaluation = session.tags.get(PURPOSE_TAG) == EVALUATION
    return Rules(policy=session.policy, evaluation=evaluation, log_check=session.log_check).train(*train)


def unusable(call: Call) -> MaskReason | None:
    """Why the harness cannot have continued from this call's tokens; None if it may have."""
    if call.outcome in _OUTCOMES:
        return _OUTCOMES[call.outcome]
    if call.flaw is Flaw.TOKENS_MISSING or len(call.output_ids) == 0:
        return MaskReason.TOKENS_MISSING
    if call.flaw is Flaw.IDS_UNKNOWN:  # no model has them, not even as context
        return MaskReason.IDS_UNKNOWN
    if call.flaw is Flaw.IMAGES_UNKNOWN:
        return MaskReason.IMAGES_UNKNOWN
    if call.delivered is False:
        return MaskReason.UNDELIVERED
    return None
