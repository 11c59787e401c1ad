"""The `renderers` package is imported without the modules that only its client of engines needs."""

from __future__ import annotations

import subprocess
import sys

IMPORT = """
import sys
from rolltap.extras import import_renderers
renderers = import_renderers("this test")
assert renderers.config_from_name("qwen3") is not None
assert not [name for name in sys.modules if name.partition(".")[0] == "openai"]
import openai
assert isinstance(openai.AsyncOpenAI, type) and openai.AsyncOpenAI is not object
"""


def test_openai_is_not_imported_with_it_and_can_be_imported_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
