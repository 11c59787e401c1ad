"""What NeMo RL trains of a reply from NeMo Gym, by its own code from its source: a reply on stdin, its messages out."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from typing import Any

from .sources import absent, provide

provide("nemo-rl", "", stand_in=lambda schema: sys.exit(f"ROLLTAP_SOURCES has no {schema.repository}"))
absent("wandb", "mlflow", "swanlab", "pynvml", "nemo_automodel", "torch.utils.tensorboard", "hydra", "hydra.utils")
from nemo_rl.environments.nemo_gym import NemoGym  # noqa: E402


class Stand:
    """The environment without its Ray actor, and a tokenizer that only names ids: text is for its logs."""

    cfg: dict[str, object] = {}  # noqa: RUF012

    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return [str(each) for each in ids]


def main() -> None:
    reply = json.load(sys.stdin)
    actor = NemoGym.__ray_metadata__.modified_class
    result = actor._postprocess_nemo_gym_to_nemo_rl_result(Stand(), {}, reply, Stand())
    json.dump([fields(message) for message in result["message_log"]], sys.stdout)


def fields(message: dict[str, Any]) -> dict[str, Any]:
    """A message's role and its tensors; context has no log-probs."""
    logprobs = message.get("generation_logprobs")
    ids = message["token_ids"].tolist()
    return {"role": message["role"], "ids": ids, "logprobs": logprobs.tolist() if logprobs is not None else None}


if __name__ == "__main__":
    main()
