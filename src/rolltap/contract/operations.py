"""The operations of a plane, each declared once: a typed method with its docstring.

A plane is a class whose methods are marked with `get` or `post`. Of each of them are made the route with its roles and
its text in OpenAPI (`rolltap.proxy.planes`), the request of every client (`request_of`), and the call that passes
through an object which asks another one (`perform`). Arguments in the path are ids. Other arguments of a `get` are its
query, the fields of an argument that is a dataclass among them; the argument of a `post` is its body.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, wraps
from inspect import Parameter, getdoc, signature
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_type_hints
from urllib.parse import quote

from rolltap.contract.keys import Role
from rolltap.contract.request import Request
from rolltap.decoding import from_json
from rolltap.types import Trajectory
from rolltap.wire import unpack

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

READERS: tuple[Role, ...] = ("admin", "viewer")


class Plane:
    """A class of operations. Its methods, unless a subclass overrides them, ask `perform`."""

    async def perform(self, operation: Operation, arguments: Sequence[Any]) -> Any:
        """Carries out an operation with its arguments, by position and complete."""
        raise NotImplementedError(operation.title)


@dataclass(frozen=True)
class Operation:
    """An operation. `title` is its name in OpenAPI.

    `own`: the argument by which a runner's key is limited to what it runs itself; "" where runners may not call it.
    """

    method: Literal["GET", "POST"]
    path: str
    title: str
    roles: tuple[Role, ...]
    own: str
    declared: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.declared.__name__

    @property
    def about(self) -> str:
        return getdoc(self.declared) or ""

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """The types of the arguments and of the reply ("return"), with what they are annotated with."""
        return get_type_hints(self.declared, include_extras=True)

    @cached_property
    def parameters(self) -> Sequence[Parameter]:
        return list(signature(self.declared).parameters.values())[1:]

    @property
    def ids(self) -> list[str]:
        """The names of the arguments in the path."""
        return [parameter.name for parameter in self.parameters if f"{{{parameter.name}}}" in self.path]

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        bound = signature(self.declared).bind(None, *args, **kwargs)
        bound.apply_defaults()
        return list(bound.arguments.values())[1:]

    def query(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields the name, type and default of each value outside the path; without a default, `Parameter.empty`."""
        for parameter in self.parameters:
            kind = self.types[parameter.name]
            if is_dataclass(kind) and isinstance(kind, type):
                hints = get_type_hints(kind, include_extras=True)
                yield from ((each.name, hints[each.name], each.default) for each in fields(kind))
            elif parameter.name not in self.ids:
                yield parameter.name, kind, parameter.default

    def gathered(self, values: Mapping[str, Any]) -> list[Any]:
        """Returns the arguments, given the values of a path and a query."""
        arguments = []
        for parameter in self.parameters:
            kind = self.types[parameter.name]
            if is_dataclass(kind) and isinstance(kind, type):
                arguments.append(kind(**{each.name: values[each.name] for each in fields(kind)}))
            else:
                arguments.append(values[parameter.name])
        return arguments

    def request(self, arguments: Sequence[Any]) -> Request[Any]:
        """Returns what a client sends."""
        named = dict(zip((parameter.name for parameter in self.parameters), arguments, strict=True))
        path = self.path.format_map({name: quote(str(value), safe="") for name, value in named.items()})
        reply = self.types["return"]
        parse: Callable[[bytes], Any] = lambda body: from_json(body, reply)  # noqa: E731
        if reply is Trajectory:
            parse = lambda body: unpack(body, Trajectory)  # noqa: E731
        if self.method == "POST":
            (body,) = arguments
            return Request("POST", path, body, parse=parse, once=True)
        values: dict[str, Any] = {}
        for name, value in named.items():
            values |= (
                {each.name: getattr(value, each.name) for each in fields(value)}
                if is_dataclass(value)
                else {name: value}
            )
        given = {name: values[name] for name, _, default in self.query() if values[name] != default}
        return Request("GET", path, query={name: _text(value) for name, value in given.items()}, parse=parse)


def get(path: str, title: str, *, roles: tuple[Role, ...] = READERS, own: str = "") -> Declare:
    """Declares an operation that only reads."""
    return _declare("GET", path, title, (*roles, "runner") if own else roles, own)


def post(path: str, title: str, *, roles: tuple[Role, ...]) -> Declare:
    """Declares an operation that changes something. A client sends it once."""
    return _declare("POST", path, title, roles, "")


class Declare(Protocol):
    """A decorator that leaves a method's type as it is."""

    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...


def operations_of(plane: type) -> list[Operation]:
    """Returns a plane's operations, in the order of their declarations."""
    methods = [method for kind in reversed(plane.__mro__) for method in vars(kind).values()]
    return [method.operation for method in methods if hasattr(method, "operation")]


def request_of(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
) -> Request[T]:
    """Returns the request for a method of a plane: `client.send(request_of(ReadPlane.session, session_id))`."""
    operation: Operation = method.operation  # type: ignore[attr-defined]
    return operation.request(operation.arguments(args, kwargs))


def _declare(method: Literal["GET", "POST"], path: str, title: str, roles: tuple[Role, ...], own: str) -> Declare:
    def declare(
        declared: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
        operation = Operation(method, path, title, roles, own, declared)

        @wraps(declared)
        async def perform(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            return await self.perform(operation, operation.arguments(args, kwargs))

        perform.operation = operation  # type: ignore[attr-defined]
        return perform

    return declare


def _text(value: Any) -> str | list[str]:
    if isinstance(value, tuple):
        return list(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
