"""The bodies of the engine's requests: vLLM's token API (0.32), as far as this engine does it.

A field that is not named here is refused with a 400 that names it. Request types are decoded by msgspec, whose
message for a wrong type has the field's path.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from rolltap.decoding import from_json
from rolltap.engine.grammar import json_grammar, regex_grammar
from rolltap.engine.sampling import SamplingOptions
from rolltap.errors import ContextOverflow, InvalidRequest

MAX_CHOICES = 64
Id = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Body = TypeVar("Body", bound=Struct)


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class ThinkingTokens(Struct, forbid_unknown_fields=True):
    """The ids around thinking, which is free (not vLLM's: it is told by `--reasoning-parser`). `budget`: its most
    tokens (vLLM's `thinking_token_budget`)."""

    close: Id
    open: Id | None = None
    opened: bool = False
    budget: Annotated[int, Meta(ge=0)] | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """A grammar for the output: one of the first four, or none with a budget of thinking. `grammar` is in llguidance's
    dialect of Lark.

    `begun`: so many of the prompt's last ids are the output's first ones (not vLLM's).
    """

    json: dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    thinking: ThinkingTokens | None = None
    begun: Annotated[int, Meta(ge=0)] = 0

    @property
    def lark(self) -> str | None:
        """The grammar; None for a budget of thinking alone. `InvalidRequest` if it is not exactly one."""
        after = self.thinking is not None
        given = [
            *([json_grammar(self.json, after_thinking=after)] if self.json is not None else []),
            *([json_grammar({"type": "object"}, after_thinking=after)] if self.json_object else []),
            *([regex_grammar(self.regex, after_thinking=after)] if self.regex is not None else []),
            *([self.grammar] if self.grammar is not None else []),
        ]
        if not given and self.thinking is not None and self.thinking.budget is not None:
            return None
        if len(given) != 1:
            raise InvalidRequest(f"structured_outputs has {len(given)} grammars, not one", param="structured_outputs")
        return given[0]


class Draw(Struct, forbid_unknown_fields=True, kw_only=True):
    """The sampling fields that both endpoints share."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Share = 0.0
    seed: int | None = None
    stop_token_ids: list[Id] = []
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # about text only
    structured_outputs: StructuredOutputs | None = None

    def sampling(self, max_tokens: int, choice: int) -> SamplingOptions:
        """The sampling of one of the `n` choices; each has its own seed."""
        return SamplingOptions(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + choice,
            stop_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            top_logprobs=self.logprobs or 0,
        )


class SamplingParams(Draw, kw_only=True):
    """`sampling_params` of `/inference/v1/generate`. Without `max_tokens`, sampling goes on to the context's end."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    detokenize: bool = False  # this endpoint has no text


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /inference/v1/generate`. The fields without a comment are honoured."""

    token_ids: Annotated[list[Id], Meta(min_length=1)]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    output_mode: Literal["tokens"] = "tokens"
    priority: Literal[0] = 0
    cache_salt: str | None = None  # prefixes are shared whatever it is
    session_id: str | None = None  # no routing to do

    prompt_field = "token_ids"

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids

    @property
    def draw(self) -> Draw:
        return self.sampling_params

    @property
    def max_tokens(self) -> int | None:
        return self.sampling_params.max_tokens


class CompletionRequest(Draw, kw_only=True):
    """`POST /v1/completions` with token ids for a prompt."""

    prompt: Annotated[list[Id], Meta(min_length=1)]
    model: str | None = None
    request_id: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    add_special_tokens: bool = True  # nothing is added to ids
    priority: Literal[0] = 0
    cache_salt: str | None = None
    session_id: str | None = None
    user: str | None = None

    prompt_field = "prompt"

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt

    @property
    def draw(self) -> Draw:
        return self


class RpcArguments(Struct, forbid_unknown_fields=True):
    weights_path: Annotated[str, Meta(min_length=1)]


class RpcRequest(Struct, forbid_unknown_fields=True):
    """`POST /collective_rpc`: the one method that this engine has."""

    method: Literal["reload_weights"]
    kwargs: RpcArguments
    args: Annotated[list[str], Meta(max_length=0)] = []
    timeout: float | None = None


class TokenizeRequest(Struct):
    prompt: str
    add_special_tokens: bool = True


class VersionRequest(Struct, forbid_unknown_fields=True):
    new_version: Annotated[str, Meta(min_length=1)]


class TransferInfo(Struct, forbid_unknown_fields=True):
    """`init_info`: where the trainer waits, and this engine's place in the group."""

    master_address: Annotated[str, Meta(min_length=1)]
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(ge=2)]
    group_name: Annotated[str, Meta(min_length=1)]
    backend: Literal["gloo"] = "gloo"
    timeout_s: Annotated[float, Meta(gt=0)] = 300.0


class TransferRequest(Struct, forbid_unknown_fields=True):
    """`POST /init_weight_transfer_engine`"""

    init_info: TransferInfo


class UpdateInfo(Struct, forbid_unknown_fields=True):
    """`update_info`: the tensors that come next, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[Annotated[int, Meta(ge=0)]]]


class UpdateRequest(Struct, forbid_unknown_fields=True):
    """`POST /update_weights`"""

    update_info: UpdateInfo


class FinishRequest(Struct, forbid_unknown_fields=True):
    """`POST /finish_weight_update`"""

    weight_version: Annotated[str, Meta(min_length=1)] | None = None


class AbortRequest(Struct, forbid_unknown_fields=True):
    request_ids: list[str] | None = None


def decode(raw: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`; `InvalidRequest` that names the field if it is not one."""
    try:
        return from_json(raw, kind)
    except msgspec.ValidationError as error:
        place = re.search(r"`\$\.?([^`]*)`", str(error))
        field = re.search(r"(?:unknown|required) field `([^`]*)`", str(error))
        names = [match[1] for match in (place, field) if match and match[1]]
        raise InvalidRequest(str(error), param=".".join(names) or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def check_prompt(request: GenerateRequest | CompletionRequest, vocabulary: int, context: int) -> int:
    """How many tokens may be sampled; raises if an id is out of `vocabulary` or the prompt fills the `context`."""
    ids, name = request.prompt_ids, request.prompt_field
    for field, tokens in ((name, ids), ("stop_token_ids", request.draw.stop_token_ids)):
        if tokens and max(tokens) >= vocabulary:
            position = next(index for index, token in enumerate(tokens) if token >= vocabulary)
            message = f"{field}[{position}] is {tokens[position]}; the vocabulary has {vocabulary} entries"
            raise InvalidRequest(message, param=field)
    room = context - len(ids)
    if room < 1:
        raise ContextOverflow(
            f"This model's maximum context length is {context} tokens. However, {name} has {len(ids)} input tokens, "
            "and at least one must be left to sample.",
            tokens=len(ids),
            limit=context,
        )
    return min(request.max_tokens or room, room)
