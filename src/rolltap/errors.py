"""All errors that rolltap raises on purpose, named by the boundary where they occur.

    RolltapError
    ├── ConfigError              the settings, at start
    │   └── DatabaseInUse              another process has the SQLite database open for writing
    ├── AlignmentError           per-token arrays of different lengths
    ├── RequestError             the harness's request (a dialect renders it in its own shape)
    │   ├── InvalidRequest       400   malformed or unsupported; names the field
    │   │   └── ReplayDiffers          a harness that runs again sends something else than in the record
    │   ├── Unauthenticated      401   no key, or an unknown one
    │   ├── Forbidden            403   the key may not do this
    │   ├── NotFound             404   no such model, session, route
    │   ├── MethodNotAllowed     405   the route takes other methods
    │   ├── SessionClosed        409   the session has ended
    │   ├── BodyTooLarge         413
    │   ├── UnsupportedEncoding  415   the body's Content-Encoding
    │   ├── ContextOverflow      400   the prompt does not fit the model
    │   └── RateLimited          429   with `retry_after`
    ├── EngineError              the model server
    │   ├── EngineUnavailable    503   unreachable, or refuses work for now
    │   ├── EngineTimeout        504
    │   ├── EngineRefused        502   the server does not accept the request
    │   │   ├── SchemaRefused          the server does not take the client's structured output
    │   │   └── ModelNotLoaded   503   the server does not have the model (yet)
    │   ├── EngineProtocolError  502   an answer that breaks its own protocol
    │   └── WeightsLost          502   a weight transfer that failed in the middle
    ├── StoreError               the call log and the ledger
    │   ├── StoreUnavailable     503
    │   └── RecordCorrupt              a stored row that fails its checks
    │       └── RecordTooLarge         a session that takes more memory than a reader may use
    ├── LedgerError              the trainer's contract
    │   ├── UnknownPolicy        404
    │   ├── LeaseLost            409   expired, foreign, or fenced by a newer lease
    │   ├── TrainerFenced        409   another trainer, or a newer incarnation, owns the policy
    │   │   └── RewindOvertaken        a rewind that may come from a process that is gone
    │   ├── VersionTaken         409   the version number is assigned to other weights
    │   └── StepRegression       409   an acknowledged step that goes backwards
    ├── RolloutError             running a rollout
    │   ├── TaskInvalid          400
    │   ├── RuntimeFailed
    │   │   └── SetupTimedOut
    │   ├── EvaluatorFailed
    │   ├── LogUnreadable               a harness's own log
    │   └── Unreadable                  what an agent left can't be read within limits
    ├── DatasetError             a dataset cannot be written or read
    ├── ServerUnreachable    503     no answer from a rolltap server
    └── TrainerError             the trainer process
        └── CheckpointMismatch   409   a checkpoint, model or tokenizer does not match the policy

`status` is the HTTP status and `code` the stable, machine-readable name of an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, Unpack

MAX_MESSAGE, MAX_PARAM = 4000, 200
"""Limits in characters: many messages quote what a client sent, and they are returned, recorded and printed."""


def capped(text: str, limit: int) -> str:
    """`text`, truncated to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class Common(TypedDict, total=False):
    """The optional fields of every error, beside its message."""

    param: str | None
    retry_after: float | None


class RolltapError(Exception):
    """The base class. `str(error)` is one line that says what to change."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        message = capped(message, MAX_MESSAGE)
        super().__init__(message)
        self.message = message
        self.param = param if param is None else capped(param, MAX_PARAM)
        self.retry_after = retry_after


class ConfigError(RolltapError):
    """The settings are invalid or cannot be applied."""

    code = "config_error"


class DatabaseInUse(ConfigError):
    """Another process has the SQLite database open for writing. `holder` is its id."""

    code = "database_in_use"

    def __init__(self, message: str, *, holder: str = "", **common: Unpack[Common]) -> None:
        super().__init__(message, **common)
        self.holder = holder


class AlignmentError(RolltapError):
    """Per-token arrays have different lengths."""

    code = "alignment_error"


class RequestError(RolltapError):
    """The request cannot be served as sent."""

    status = 400
    code = "invalid_request"


class InvalidRequest(RequestError):
    """Malformed or unsupported; `param` names the field."""


class ReplayDiffers(InvalidRequest):
    """The harness of a replayed session sends something else than in the record; the message has both sides."""

    code = "replay_differs"


class Unauthenticated(RequestError):
    """No key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key may not do this."""

    status = 403
    code = "forbidden"


class NotFound(RequestError):
    """No such model, session or route."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The route does not take this method."""

    status = 405
    code = "method_not_allowed"


class SessionClosed(RequestError):
    """The session has ended. Nothing was sampled."""

    status = 409
    code = "session_closed"


class BodyTooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class UnsupportedEncoding(RequestError):
    """The body's `Content-Encoding` is not one that is decoded here."""

    status = 415
    code = "unsupported_encoding"


class ContextOverflow(RequestError):
    """The prompt does not fit: it has at least `tokens` tokens, and the model's limit is `limit` (None: unknown)."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, tokens: int | None = None, limit: int | None = None, **common: Unpack[Common]
    ) -> None:
        super().__init__(message, **common)
        self.tokens = tokens
        self.limit = limit


class RateLimited(RequestError):
    """Too many calls for this key, or the engine asks to wait."""

    status = 429
    code = "rate_limit_exceeded"


class EngineError(RolltapError):
    """The model server failed. `http_status`: its answer's status; None without an answer, or from another plane."""

    status = 502
    code = "engine_error"

    def __init__(self, message: str, *, http_status: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(message, **common)
        self.http_status = http_status


class EngineUnavailable(EngineError):
    """The model server is unreachable or refuses work for now."""

    status = 503
    code = "engine_unavailable"


class EngineTimeout(EngineError):
    """The model server did not answer in time."""

    status = 504
    code = "engine_timeout"


class EngineRefused(EngineError):
    """The model server does not accept the request: unknown route, model or field, or missing permission."""

    code = "engine_refused"


class SchemaRefused(EngineRefused):
    """The model server refuses a request with structured output, or fails at it: the client's schema is wrong. A source
    turns it into an `InvalidRequest`."""


class ModelNotLoaded(EngineRefused):
    """The model server does not have the policy's model, but may get it: adapters are pushed."""

    status = 503
    code = "model_not_loaded"


class EngineProtocolError(EngineError):
    """The model server's answer breaks its own protocol."""

    code = "engine_protocol_error"


class WeightsLost(EngineError):
    """A weight transfer failed in the middle: the engines' weights belong to no version until a complete push."""

    code = "weights_lost"


class StoreError(RolltapError):
    """The call log or the ledger failed."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """The store is unreachable or cannot write."""

    status = 503
    code = "store_unavailable"


class RecordCorrupt(StoreError):
    """A stored row fails its checks."""

    code = "record_corrupt"


class RecordTooLarge(RecordCorrupt):
    """The calls of a session take more memory than a reader may use: its agent made too many, of too long prompts."""

    code = "record_too_large"


class LedgerError(RolltapError):
    """The request breaks the trainer's contract."""

    status = 409
    code = "ledger_error"


class UnknownPolicy(LedgerError):
    """No policy of this name."""

    status = 404
    code = "unknown_policy"


class LeaseLost(LedgerError):
    """The lease has expired, belongs to another trainer, or was replaced by a newer one."""

    code = "lease_lost"


class TrainerFenced(LedgerError):
    """Another trainer, or a newer incarnation of this one, owns the policy: stop this process."""

    code = "trainer_fenced"


class RewindOvertaken(TrainerFenced):
    """Another process with the trainer's name rewound after this one had asked for the incarnation."""

    code = "rewind_overtaken"


class VersionTaken(LedgerError):
    """The version number is assigned to other weights."""

    code = "version_taken"


class StepRegression(LedgerError):
    """The acknowledged step goes backwards."""

    code = "step_regression"


class RolloutError(RolltapError):
    """A rollout could not be run."""

    code = "rollout_error"


class TaskInvalid(RolloutError):
    """The task is invalid. `param` names the key to change."""

    status = 400
    code = "task_invalid"


class RuntimeFailed(RolloutError):
    """The runtime could not be created, or was lost. The harness in it is not the cause."""

    code = "runtime_failed"


class SetupTimedOut(RuntimeFailed):
    """The runtime was not created within the set-up's time limit."""

    code = "setup_timed_out"


class EvaluatorFailed(RolloutError):
    """The evaluator gave no usable reward."""

    code = "evaluator_failed"


class NoReward(EvaluatorFailed):
    """The evaluator's program ran, and gave no usable reward. If it gives none for the task's own files either, the
    work may be no better than none: it is worth 0 in the baseline, and out of the loss."""

    code = "no_reward"


class LogUnreadable(RolloutError):
    """A harness's own log cannot be parsed. It is not compared with the record."""

    code = "log_unreadable"


class Unreadable(RolloutError):
    """What an agent left can't be read within a reader's limits, or makes the reader fail. The agent is the cause."""

    code = "unreadable"


class DatasetError(RolltapError):
    """A dataset cannot be written or read as requested. No partial files remain."""

    status = 400
    code = "dataset_error"


class RowError(DatasetError):
    """A row cannot be written in its format. Other rows are not affected."""


class ServerUnreachable(RolltapError):
    """A rolltap server did not answer within the client's retry time."""

    status = 503
    code = "server_unreachable"


class TrainerError(RolltapError):
    """The trainer process can't go on."""

    code = "trainer_error"


class CheckpointMismatch(TrainerError):
    """The checkpoint, model or tokenizer is not the policy's."""

    status = 409
    code = "checkpoint_mismatch"


BY_CODE: Mapping[str, type[RolltapError]] = {
    kind.code: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, RolltapError)
}
"""Each code's error: the last that is declared with it."""
