"""The first use of a type in several threads.

With `lambda k: msgspec.json.decode(TEXT, type=k)` three times in `decodes`, the child process of the first test ends
with signal 11 (msgspec 0.22.0, 3 of 3 times).
"""

from __future__ import annotations

import ast
import subprocess
import sys

import msgspec
import pytest

from rolltap.decoding import convert, from_json, from_msgpack, json_decoder, msgpack_decoder

from .product import Source, sources

FIRST_USES = """
import sys, threading
import msgspec
from rolltap.decoding import convert, from_json, from_msgpack

def race(kind, barrier, failures, decode):
    barrier.wait()
    try:
        assert decode(kind).z == "hi"
    except BaseException as error:
        failures.append(error)

sys.setswitchinterval(1e-6)
VALUE = {"z": "hi", "f7": {"a": 1}}
PACKED, TEXT = msgspec.msgpack.encode(VALUE), msgspec.json.encode(VALUE)
failures = []
for number in range(200):
    inner = [msgspec.defstruct(f"Inner{at}", [("a", int, 0), ("b", str | None, None)]) for at in range(8)]
    fields = [(f"f{at}", inner[at] | None, None) for at in range(8)]
    kind = msgspec.defstruct("Outer", [*fields, ("z", str, "")])
    barrier = threading.Barrier(3)
    decodes = [lambda k: from_json(TEXT, k), lambda k: from_msgpack(PACKED, k), lambda k: convert(VALUE, k)]
    threads = [threading.Thread(target=race, args=(kind, barrier, failures, decode)) for decode in decodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert not failures, failures
"""
DECODERS = {"json.decode", "msgpack.decode", "yaml.decode", "toml.decode", "json.Decoder", "msgpack.Decoder", "convert"}


def test_threads_may_decode_a_type_for_the_first_time_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_decoders_are_made_once_for_each_type_and_hook() -> None:
    assert json_decoder(dict[str, int]) is json_decoder(dict[str, int])
    assert msgpack_decoder(int | str) is msgpack_decoder(int | str)
    assert msgpack_decoder(int) is not msgpack_decoder(int, lambda kind, value: value)
    assert from_json(b'{"a": 1}', dict[str, int]) == from_msgpack(b"\x81\xa1a\x01", dict[str, int]) == {"a": 1}
    assert convert({"a": 1}, dict[str, int]) == {"a": 1}
    with pytest.raises(msgspec.ValidationError):
        from_json(b'{"a": "1"}', dict[str, int])


def test_nothing_else_asks_msgspec_to_decode_a_type() -> None:
    places = {source.name: [call.lineno for call in calls_of(source)] for source in sources()}
    assert [name for name, lines in places.items() if lines] == ["decoding.py"]


def calls_of(source: Source) -> list[ast.Call]:
    """The calls by which a file decodes with msgspec into a type."""
    last = {name.rpartition(".")[2] for name in DECODERS}
    calls = [node for node in source.nodes if isinstance(node, ast.Call)]
    asked = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in last]
    return [call for call in asked if is_typed(call, ast.unparse(call.func))]


def is_typed(call: ast.Call, name: str) -> bool:
    asked = name.removeprefix("msgspec.")
    if not name.startswith("msgspec.") or asked not in DECODERS:
        return False
    return not asked.endswith(".decode") or any(keyword.arg == "type" for keyword in call.keywords)
