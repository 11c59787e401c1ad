"""An agent server of NeMo Gym whose rollouts rolltap plays, with any harness.

It needs ROLLTAP_ADMIN_KEY, a key of the role admin. A row's task is its field `rolltap_task` (../../rows.py). `tries`:
how many rollouts are played for a row until one can be trained; those that can't are missing in the mean reward.
"""

import os
from typing import Any

from fastapi import HTTPException
from nemo_gym.base_resources_server import AggregateMetrics, AggregateMetricsRequest, BaseRunRequest
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from pydantic import ConfigDict, PositiveInt

from rolltap.errors import RolltapError
from rolltap.http_client import AsyncHttpClient
from rolltap.trainer_client.adapters.nemo_gym_agent import FAILURE, GymAgent


class RolltapAgentConfig(BaseResponsesAPIAgentConfig):
    url: str
    policy: str
    tries: PositiveInt = 1


class RolltapRunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class RolltapAgent(SimpleResponsesAPIAgent):
    config: RolltapAgentConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        raise HTTPException(501, "rolltap's harness asks its model itself: post the row to /run")

    async def run(self, body: RolltapRunRequest) -> dict[str, Any]:
        try:
            async with AsyncHttpClient(self.config.url, os.environ.get("ROLLTAP_ADMIN_KEY", "")) as client:
                agent = GymAgent(client, self.config.policy, self.config.tries)
                reply = await agent.run(body.model_dump(exclude_unset=True))
        except RolltapError as error:
            raise HTTPException(error.status, error.message) from error
        for reason in reply.get("refused", ()):
            print(f"refused: {reason}")
        return reply

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        played = [each for each in body.verify_responses if FAILURE not in each]
        return await super().aggregate_metrics(AggregateMetricsRequest(verify_responses=played))


if __name__ == "__main__":
    RolltapAgent.run_webserver()
