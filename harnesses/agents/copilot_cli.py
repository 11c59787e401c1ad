"""GitHub Copilot CLI (npm) with a custom provider: Chat Completions, Responses or Anthropic Messages."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.harnesses.base import Command, Job, Package, choice

PACKAGE = Package("npm", "@github/copilot", "1.0.102", executable="copilot")
WIRES = {
    "openai_chat": {"COPILOT_PROVIDER_TYPE": "openai", "COPILOT_PROVIDER_WIRE_API": "completions"},
    "openai_responses": {"COPILOT_PROVIDER_TYPE": "openai", "COPILOT_PROVIDER_WIRE_API": "responses"},
    "anthropic": {"COPILOT_PROVIDER_TYPE": "anthropic"},
}


@dataclass(frozen=True, slots=True)
class CopilotCli:
    dialect: str = "openai_chat"
    name: str = "copilot-cli"
    package: Package = PACKAGE
    quirks: tuple[str, ...] = (
        "It compacts in the background beside the main thread (x-interaction-type: conversation-compaction).",
        "A resumed run re-serialises tool arguments and drops reasoning: a history_edited break.",
        "Invalid tool arguments come back as {}; Responses item ids are rewritten.",
        "A clean end of the stream without its terminal event passes for a final answer.",
    )

    def __post_init__(self) -> None:
        choice("dialect of copilot-cli", self.dialect, WIRES)

    def launch(self, job: Job) -> Command:
        endpoint = job.endpoint
        window = {
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(endpoint.context - endpoint.reserve),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(endpoint.reserve),
        }
        base = endpoint.base_url if self.dialect == "anthropic" else endpoint.v1
        argv = ["copilot", "--allow-all-tools", *(["--continue"] if job.resume else [])]
        return Command(
            (*argv, "-p", job.instruction),
            env={
                "COPILOT_PROVIDER_BASE_URL": base,
                "COPILOT_PROVIDER_API_KEY": endpoint.key,
                "COPILOT_MODEL": endpoint.model,
                "COPILOT_OFFLINE": "true",
                "COPILOT_AUTO_UPDATE": "false",
                **WIRES[self.dialect],
                **(window if endpoint.context else {}),
            },
        )
