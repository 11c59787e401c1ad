"""Every error that rolltap raises on purpose, named by the boundary where it arises.

    RolltapError
    ├── ConfigError              the settings, at start
    ├── AlignmentError           per-token arrays of different lengths
    ├── RequestError             the harness's request (a dialect renders it in its own shape)
    │   ├── InvalidRequest       400   malformed or unsupported; names the field
    │   ├── Unauthenticated      401   no key, or an unknown one
    │   ├── Forbidden            403   the key may not do this
    │   ├── NotFound             404   no such model, session, route
    │   ├── MethodNotAllowed     405   the route takes other methods
    │   ├── SessionClosed        409   the session has ended
    │   ├── BodyTooLarge         413
    │   ├── ContextOverflow      400   the prompt does not fit the model
    │   └── RateLimited          429   with `retry_after`
    ├── EngineError              the model server
    │   ├── EngineUnavailable    503   can't be reached, or refuses work for now
    │   ├── EngineTimeout        504
    │   ├── EngineRefused        502   a request that the server does not take
    │   │   └── ModelNotLoaded   503   it has no model of that name, perhaps not yet
    │   ├── EngineProtocolError  502   an answer that breaks its own protocol
    │   └── WeightsLost          502   a transfer of weights that broke off
    ├── StoreError               the call log and the ledger
    │   ├── StoreUnavailable     503
    │   └── RecordCorrupt              a stored row that fails its checks
    ├── LedgerError              the trainer's contract
    │   ├── UnknownPolicy        404
    │   ├── LeaseLost            409   expired, foreign, or fenced by a newer lease
    │   ├── TrainerFenced        409   the policy is another trainer's, or a newer incarnation's
    │   ├── VersionTaken         409   the number of a weight version stands for other weights
    │   └── StepRegression       409   an acknowledged step that goes backwards
    ├── RolloutError             running a rollout
    │   ├── TaskInvalid          400
    │   ├── RuntimeFailed
    │   │   └── SetupTimedOut
    │   ├── EvaluatorFailed
    │   └── LogUnreadable               a harness's own log
    ├── DatasetError             a dataset that can't be written or read as asked
    ├── ServerUnreachable    503     no answer from a rolltap server
    └── TrainerError             the trainer process
        └── CheckpointMismatch   409   a checkpoint, model or tokenizer that is not the policy's

`status` is the HTTP status and `code` the stable, machine-readable name of an error.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

MAX_MESSAGE, MAX_PARAM = 4000, 200
"""Characters. What a client sent stands in many messages, and each is answered, recorded and printed."""


def capped(text: str, limit: int) -> str:
    """`text`, its end left out where it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class Common(TypedDict, total=False):
    """What every error may carry over the wire beside its message."""

    param: str | None
    retry_after: float | None


class RolltapError(Exception):
    """The root. `str(error)` is one line that says what to change."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        message = capped(message, MAX_MESSAGE)
        super().__init__(message)
        self.message = message
        self.param = param if param is None else capped(param, MAX_PARAM)
        self.retry_after = retry_after


class ConfigError(RolltapError):
    """The settings can't be used."""

    code = "config_error"


class AlignmentError(RolltapError):
    """Per-token arrays that must be equal in length are not."""

    code = "alignment_error"


class RequestError(RolltapError):
    """The request can't be served as sent."""

    status = 400
    code = "invalid_request"


class InvalidRequest(RequestError):
    """Malformed or unsupported; `param` names the field."""


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
    """The session has ended; nothing was recorded or sampled."""

    status = 409
    code = "session_closed"


class BodyTooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class ContextOverflow(RequestError):
    """The prompt does not fit the context: it has `tokens` or more, the model takes `limit` (None: not known)."""

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
    """The model server failed."""

    status = 502
    code = "engine_error"


class EngineUnavailable(EngineError):
    """The model server can't be reached, or refuses work for now; `http_status` is what it answered, if it did."""

    status = 503
    code = "engine_unavailable"

    def __init__(self, message: str, *, http_status: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(message, **common)
        self.http_status = http_status


class EngineTimeout(EngineError):
    """The model server did not answer in time."""

    status = 504
    code = "engine_timeout"


class EngineRefused(EngineError):
    """The model server does not take the request: no such route, model or field, or no right to it.

    `http_status` is the server's own, None where the error came over another plane.
    """

    code = "engine_refused"

    def __init__(self, message: str, *, http_status: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(message, **common)
        self.http_status = http_status


class ModelNotLoaded(EngineRefused):
    """The model server has no model of the policy's name, and may get it: adapters are pushed."""

    status = 503
    code = "model_not_loaded"


class EngineProtocolError(EngineError):
    """The model server's answer breaks its own protocol."""

    code = "engine_protocol_error"


class WeightsLost(EngineError):
    """A transfer of weights broke off in the middle: what the engines hold is no version's, until a whole push."""

    code = "weights_lost"


class StoreError(RolltapError):
    """The call log or the ledger failed."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """The store can't be reached or can't write."""

    status = 503
    code = "store_unavailable"


class RecordCorrupt(StoreError):
    """A stored row fails its checks."""

    code = "record_corrupt"


class LedgerError(RolltapError):
    """The trainer's contract was broken by the request."""

    status = 409
    code = "ledger_error"


class UnknownPolicy(LedgerError):
    """No policy of this name."""

    status = 404
    code = "unknown_policy"


class LeaseLost(LedgerError):
    """The lease has expired, is another trainer's, or is fenced by a newer one."""

    code = "lease_lost"


class TrainerFenced(LedgerError):
    """The policy is another trainer's, or a newer incarnation's of this one: stop, and leave the weights alone."""

    code = "trainer_fenced"


class VersionTaken(LedgerError):
    """The number of a weight version stands for other weights."""

    code = "version_taken"


class StepRegression(LedgerError):
    """The acknowledged step goes backwards."""

    code = "step_regression"


class RolloutError(RolltapError):
    """A rollout could not be run."""

    code = "rollout_error"


class TaskInvalid(RolloutError):
    """The task can't be run as written; `param` names the key to change."""

    status = 400
    code = "task_invalid"


class RuntimeFailed(RolloutError):
    """The place to run in could not be made, or was lost: nobody's fault who runs in it."""

    code = "runtime_failed"


class SetupTimedOut(RuntimeFailed):
    """The place was not made within the set-up's budget."""

    code = "setup_timed_out"


class EvaluatorFailed(RolloutError):
    """The evaluator gave no reward that can be used."""

    code = "evaluator_failed"


class LogUnreadable(RolloutError):
    """A harness's own log is not what it should be; it is not compared, and nothing else follows."""

    code = "log_unreadable"


class DatasetError(RolltapError):
    """A dataset can't be written or read as asked; nothing was left behind."""

    status = 400
    code = "dataset_error"


class RowError(DatasetError):
    """A row that can't be written in its format; the others can."""


class ServerUnreachable(RolltapError):
    """A rolltap server did not answer for as long as the client tries."""

    status = 503
    code = "server_unreachable"


class TrainerError(RolltapError):
    """The trainer process can't go on."""

    code = "trainer_error"


class CheckpointMismatch(TrainerError):
    """The checkpoint, model or tokenizer is not the policy's."""

    status = 409
    code = "checkpoint_mismatch"
