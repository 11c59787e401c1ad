"""A model's reply that is no action of a game pays nothing and ends nothing: it is told so, and answers again.

`gymnasium` is a stand-in with the spaces that the driver asks; real games are played in `make test-trainers`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

GYMNASIUM = """
import types
import numpy


class Space:
    dtype = shape = None


class Discrete(Space):
    pass


class Text(Space):
    pass


class Box(Space):
    dtype = numpy.dtype("float32")

    def __init__(self, low, high, shape):
        self.low, self.high, self.shape = low, high, shape

    def contains(self, x):
        return getattr(x, "shape", None) == self.shape and bool(numpy.all((self.low <= x) & (x <= self.high)))


class Dict(Space):
    def __init__(self, spaces):
        self.spaces = spaces

    def __getitem__(self, name):
        return self.spaces[name]

    def contains(self, x):
        return isinstance(x, dict) and x.keys() == self.spaces.keys() and all(self[n].contains(x[n]) for n in x)


class Tuple(Space):
    def __init__(self, spaces):
        self.spaces = spaces

    def __len__(self):
        return len(self.spaces)

    def __iter__(self):
        return iter(self.spaces)

    def contains(self, x):
        return isinstance(x, tuple) and len(x) == len(self) and all(s.contains(each) for s, each in zip(self, x))


spaces = types.SimpleNamespace(**{each.__name__: each for each in (Discrete, Text, Box, Dict, Tuple)})
"""
GAME = """
import json, sys
from gymnasium import spaces
import environment, rolltap_gymnasium


class Bet:
    render_mode = None

    def __init__(self, low, high, form):
        one = spaces.Box(low, high, ())
        every = {"list": spaces.Box(low, high, (2,)), "number": one, "dict": spaces.Dict({"bet": one})}
        self.action_space = {**every, "tuple": spaces.Tuple([one, one])}[form]

    def reset(self, seed):
        return "How much?", {}

    def step(self, action):
        while not isinstance(action, float) and getattr(action, "shape", None) != ():
            action = action["bet"] if isinstance(action, dict) else action[0]
        return "paid", float(action), True, False, {}


for low, high, form, replies in json.load(sys.stdin):
    told = iter(replies)
    environment.ask = lambda job, messages: {"content": next(told)}
    rolltap_gymnasium.load = lambda where: Bet
    job = {"where": "x@Bet", "options": {"make": {"low": low, "high": high, "form": form}}, "sample": 0, "turns": 0}
    print(rolltap_gymnasium.play(job)["reward"])
"""
FORMS = {"list": "[{0}, {0}]", "number": "{0}", "dict": '{{"bet": {0}}}', "tuple": "[{0}, {0}]"}
NO_VALUES = ("1e400", "NaN", "-Infinity", '"one"', "null", "[[1]]", "{}", "[]", "", "one", "1, 1]", "[" * 100_000)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_action_of_a_game_pays_nothing(form: str, tmp_path: Path) -> None:
    games, paid = [], []
    for _ in range(20):
        low = random.uniform(-9, 9)
        high, beyond = low + random.uniform(1, 9), random.choice((1e9, 1e30))
        outside = [FORMS[form].format(each) for each in (high + beyond, low - beyond, high * 1.5 + 10, *NO_VALUES)]
        action = round(random.uniform(low, high), 3)
        games.append((low, high, form, [*random.sample(outside, 5), FORMS[form].format(action)]))
        paid.append(action)
    drivers = files("rolltap.harnesses.agents.drivers")
    for name in ("environment", "rolltap_gymnasium"):
        (tmp_path / f"{name}.py").write_text(drivers.joinpath(f"{name}.py.txt").read_text("utf-8"))
    (tmp_path / "gymnasium.py").write_text(GYMNASIUM)
    (tmp_path / "game.py").write_text(GAME)
    command = (sys.executable, "-W", "ignore", str(tmp_path / "game.py"))
    done = subprocess.run(command, input=json.dumps(games), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(map(float, done.stdout.split())) == pytest.approx(paid, rel=1e-5)
