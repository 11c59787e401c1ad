"""A NeMo Gym resource server of one question a task, in the package's own form (run in an environment that has it)."""

from nemo_gym.base_resources_server import (  # type: ignore[import-not-found]
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class CapitalsConfig(BaseResourcesServerConfig):
    longest: int


class CapitalsVerifyRequest(BaseVerifyRequest):
    capital: str = ""


class CapitalsVerifyResponse(BaseVerifyResponse):
    right: bool
    short: bool


class Capitals(SimpleResourcesServer):
    config: CapitalsConfig

    async def verify(self, body: CapitalsVerifyRequest) -> CapitalsVerifyResponse:
        if not body.capital:
            return await self.judge(body)
        text = body.response.output_text
        right, short = body.capital in text, len(text) <= self.config.longest
        reward = float(right) if short else right / 2
        return CapitalsVerifyResponse(**body.model_dump(), reward=reward, right=right, short=short)

    async def judge(self, body: CapitalsVerifyRequest) -> CapitalsVerifyResponse:
        """Asks a judge, as many servers do: the policy itself, and without an answer the reward is 0."""
        try:
            await self.server_client.post("policy_model", "/v1/responses", json={"input": "Is that right?"})
            right = True
        except ValueError:
            right = False
        return CapitalsVerifyResponse(**body.model_dump(), reward=float(right), right=right, short=True)
