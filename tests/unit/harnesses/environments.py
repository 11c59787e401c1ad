"""What an environment's driver prints at its end."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from rolltap.harnesses.environments import proof_key


def signed(result: Mapping[str, Any], session_id: str) -> str:
    """The line that the driver of an episode in the session prints."""
    text = json.dumps(result)
    proof = hmac.new(bytes.fromhex(proof_key(session_id)), text.encode(), "sha256").hexdigest()
    return json.dumps({"proof": proof, "result": text})
