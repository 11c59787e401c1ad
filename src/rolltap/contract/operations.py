"""The operations of a plane, each declared once: a typed method with its docstring. And what a client sends to a plane,
and how it reads the reply (`rolltap.http_client` sends it).

A plane is a class whose methods are marked with `get` or `post`. Of each of them are made the route with its roles and
its text in OpenAPI (`rolltap.proxy.planes.router`), and the request of every client (`ask` of `rolltap.http_client`).
A server is a subclass that overrides the methods; where it does not, `perform` is asked. Arguments in the path are ids.
Another argument of a `post` is its body. Other arguments of a `get` are its query, the fields of an argument that is a
dataclass among them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, wraps
from inspect import Parameter, getdoc, signature
from types import NoneType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import quote, urlencode

import msgspec

from rolltap.contract.base import MAX_BODY, RequestBody, values_of
from rolltap.contract.keys import Role
from rolltap.decoding import from_json
from rolltap.errors import RolltapError
from rolltap.wire import CONTENT_TYPE, unpack

T = TypeVar("T")

TRY_HEADER = "x-rolltap-try"
CALL_HEADER = "x-rolltap-call"
"""Of a reply on the agent plane: the id of the call that it answers, with several choices of the first."""


@dataclass(frozen=True, slots=True)
class RequestTry:
    """One of a client's tries of a request that changes something. `number` counts from 0."""

    request: str
    number: int

    @classmethod
    def read(cls, header: str) -> RequestTry | None:
        """The try of a header; None if there is no such header, or another client wrote it."""
        request, _, number = header.partition("/")
        return cls(request[:64], int(number[:9])) if request and number.isascii() and number.isdigit() else None

    @property
    def header(self) -> dict[str, str]:
        return {TRY_HEADER: f"{self.request}/{self.number}"}


current_try: ContextVar[RequestTry | None] = ContextVar("rolltap_current_try", default=None)
"""The try that is carried out now."""


def read_json(body: bytes) -> Any:
    return msgspec.json.decode(body) if body else None


def read_as(kind: type[T]) -> Callable[[bytes], T]:
    """Reads a reply as `kind`, a dataclass of `rolltap.contract`. Fields that it does not have are ignored."""
    return lambda body: from_json(body, kind)


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """One call. `body` is sent as JSON; `parse` reads the reply's body.

    `wait` is how many seconds the server may take on purpose, beyond the client's time-out.
    """

    method: str
    path: str
    body: Any = None
    query: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    parse: Callable[[bytes], T] = read_json
    wait: float = 0.0
    once: bool = False

    @property
    def target(self) -> str:
        return f"{self.path}?{urlencode(self.query, doseq=True)}" if self.query else self.path

    @property
    def content(self) -> bytes | None:
        return None if self.body is None else msgspec.json.encode(self.body)

    def read(self, body: bytes) -> T:
        """The parsed reply; `RolltapError` if no rolltap server writes such a reply."""
        try:
            return self.parse(body)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise RolltapError(f"{self.method} {self.path}: the reply is not a rolltap server's: {error}") from error


P = ParamSpec("P")
S = TypeVar("S")

READERS: tuple[Role, ...] = ("admin", "viewer")


class Plane:
    """A class of operations, or a section of one, with the `tag` of its routes in OpenAPI."""

    tag: ClassVar[str]

    async def perform(self, operation: Operation, arguments: Sequence[Any]) -> Any:
        """Carries out an operation with its arguments, by position and complete."""
        raise NotImplementedError(operation.title)


@dataclass(frozen=True)
class OtherThanJson:
    """Stands in the annotation of a reply with another `media_type`. `empty`: what the status 204, None, means."""

    media_type: str
    about: str
    format: str = ""
    empty: str = ""


def packed(about: str, *, empty: str = "") -> OtherThanJson:
    """A reply as `rolltap.wire` packs it."""
    return OtherThanJson(CONTENT_TYPE, about, "binary", empty)


@dataclass(frozen=True)
class Operation:
    """An operation. `title` is its name in OpenAPI.

    `own`: the argument by which a runner's key is limited to what it runs itself; "" without such a limit.
    `audited`: calls are in the audit log (leases, claims, attempts and rewards have the key in their rows); refusals
    always are. `all_tenants`: it shows all of them, to keys of the default tenant only. A client sends it `once`, or
    repeats it while the server can't be reached. The field `wait` of its body is how many seconds the server may take
    on purpose. `most_bytes` are those of its body: more than others have only if one item of it can be larger.
    """

    method: Literal["GET", "POST"]
    path: str
    title: str
    roles: tuple[Role, ...]
    declared: Callable[..., Any]
    own: str = ""
    audited: bool = False
    all_tenants: bool = False
    once: bool = False
    wait: str = ""
    most_bytes: int = MAX_BODY

    @property
    def name(self) -> str:
        return self.declared.__name__

    @property
    def row(self) -> str:
        """The method and the path."""
        return f"{self.method} {self.path}"

    @property
    def about(self) -> str:
        return getdoc(self.declared) or ""

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """The types of the arguments and of the reply ("return"), with what they are annotated with."""
        return get_type_hints(self.declared, include_extras=True)

    @cached_property
    def reply(self) -> tuple[Any, OtherThanJson | None]:
        """The reply's type, and the form in which it is sent if that is not JSON."""
        kind = self.types["return"]
        if get_origin(kind) is Annotated:
            kind, form = get_args(kind)
            return next((each for each in get_args(kind) if each is not NoneType), kind) if form.empty else kind, form
        return kind, None

    @cached_property
    def parameters(self) -> Sequence[Parameter]:
        return list(signature(self.declared).parameters.values())[1:]

    @property
    def ids(self) -> list[str]:
        """The names of the arguments in the path."""
        return [parameter.name for parameter in self.parameters if f"{{{parameter.name}}}" in self.path]

    @property
    def body(self) -> str:
        """The name of the argument that is sent as the body; "" without one."""
        if self.method == "GET":
            return ""
        return next((parameter.name for parameter in self.parameters if parameter.name not in self.ids), "")

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        bound = signature(self.declared).bind(None, *args, **kwargs)
        bound.apply_defaults()
        return list(bound.arguments.values())[1:]

    def query(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields the name, type and default of each value of the query; without a default, `Parameter.empty`."""
        for parameter in self.parameters:
            kind = self.types[parameter.name]
            if _is_of_fields(kind):
                hints = get_type_hints(kind, include_extras=True)
                yield from ((each.name, hints[each.name], each.default) for each in fields(kind))
            elif parameter.name not in (*self.ids, self.body):
                yield parameter.name, kind, parameter.default

    def gathered(self, values: Mapping[str, Any]) -> list[Any]:
        """Returns the arguments, given the values of a path, a query and a body."""
        arguments = []
        for parameter in self.parameters:
            kind = self.types[parameter.name]
            if _is_of_fields(kind):
                arguments.append(kind(**{each.name: values[each.name] for each in fields(kind)}))
            else:
                arguments.append(values[parameter.name])
        return arguments

    def request(self, arguments: Sequence[Any]) -> Request[Any]:
        """Returns what a client sends."""
        named = dict(zip((parameter.name for parameter in self.parameters), arguments, strict=True))
        path = self.path.format_map({name: quote(str(named[name]), safe="") for name in self.ids})
        body: RequestBody | None = named.get(self.body)
        values: dict[str, Any] = {}
        for name, value in named.items():
            values |= (
                {each.name: getattr(value, each.name) for each in fields(value)}
                if is_dataclass(value)
                else {name: value}
            )
        given = {name: values[name] for name, _, default in self.query() if values[name] != default}
        return Request(
            self.method,
            path,
            None if body is None else values_of(body),
            {name: _text(value) for name, value in given.items()},
            self._parse,
            wait=getattr(body, self.wait) if self.wait else 0.0,
            once=self.once,
        )

    def _parse(self, body: bytes) -> Any:
        kind, form = self.reply
        if form is None:
            return from_json(body, kind)
        return unpack(body, kind) if body or not form.empty else None


def get(
    path: str, title: str = "", *, roles: tuple[Role, ...] = READERS, own: str = "", all_tenants: bool = False
) -> Declare:
    """Declares an operation that only reads."""
    return _declare("GET", path, title, (*roles, "runner") if own else roles, own=own, all_tenants=all_tenants)


def post(
    path: str,
    title: str = "",
    *,
    roles: tuple[Role, ...],
    audited: bool = False,
    once: bool = False,
    wait: str = "",
    most_bytes: int = MAX_BODY,
) -> Declare:
    """Declares an operation that changes something, or has more to say than a query holds."""
    return _declare("POST", path, title, roles, audited=audited, once=once, wait=wait, most_bytes=most_bytes)


class Declare(Protocol):
    """A decorator that leaves a method's type as it is."""

    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...


def operations_of(plane: type[Plane]) -> list[Operation]:
    """Returns a plane's operations, in the order of their declarations."""
    methods = [method for kind in reversed(plane.__mro__) for method in vars(kind).values()]
    return [method.operation for method in methods if hasattr(method, "operation")]


def request_of(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
) -> Request[T]:
    """Returns the request for a method of a plane: `client.send(request_of(ReadPlane.session, session_id))`."""
    operation: Operation = method.operation  # type: ignore[attr-defined]
    return operation.request(operation.arguments(args, kwargs))


def _declare(method: Literal["GET", "POST"], path: str, title: str, roles: tuple[Role, ...], **more: Any) -> Declare:
    def declare(
        declared: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
        operation = Operation(method, path, title or declared.__name__, roles, declared, **more)

        @wraps(declared)
        async def perform(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            return await self.perform(operation, operation.arguments(args, kwargs))

        perform.operation = operation  # type: ignore[attr-defined]
        return perform

    return declare


def _is_of_fields(kind: Any) -> bool:
    return is_dataclass(kind) and isinstance(kind, type)


def _text(value: Any) -> str | list[str]:
    if isinstance(value, tuple):
        return list(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
