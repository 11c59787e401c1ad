"""Which test reads each format as its consumer does, and the table of it in docs/exports.md.

`python -m tests.unit.exporters.readers` writes the table.
"""

from __future__ import annotations

from pathlib import Path

from rolltap.reconstructor.exporters import exporter_named

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "exports.md"
BEGIN, END = "<!-- formats -->\n", "<!-- /formats -->\n"

HARBOR = "test_harbor_details_are_lists_of_equal_length_with_the_main_agent_first"
FORMATS, TRL, RECORD = "test_formats.py", "test_trl.py", "test_from_trajectories.py"
ENVIRONMENTS = "../../trainers/test_environments.py"

ROWS: dict[str, str] = {
    "trajectories": "a segment: arrays; turns, calls, rewards, conversation as JSON texts",
    "sft-tokens": "a segment: `input_ids`, `labels` (-100 off the mask)",
    "sft": "a conversation: `messages`, `tools`; with `targets=split` a reply: `prompt`, `completion`",
    "preference": "a pair within a group: `prompt`, `chosen`, `rejected`",
    "kto": "a rollout: `prompt`, `completion`, `label`",
    "sharegpt": "a conversation, or a reply: `conversations`, `system`, `tools`",
    "verl-rl": "a task: `data_source`, `prompt`, `ability`, `reward_model`, `extra_info`",
    "atif": "a document of ATIF v1.7, recorded tokens and log-probs in `metrics`",
    "transitions": "a trained call: state, action, reward, return to go, done",
    "harbor": "a session: `rollout_details`",
    "verifiers": "a session: an `Episode` with a `Trace`, a branch a segment",
    "nemo-gym": "a rollout: `responses_create_params`, `response` with ids and log-probs, `reward`",
    "trl-grpo": "a rollout: `prompt_ids`, `completion_ids`, `env_mask`, `logprobs`, `reward`",
    "slime": "a segment: slime's `Sample`",
    "skyrl-sft": "a segment: `input_ids`, `loss_mask`",
    "skyrl-rl": "a task: `prompt`, `env_class`, `reward_spec`, `extra_info`",
}

READERS: dict[str, list[tuple[str, str, str]]] = {
    "trajectories": [
        ("datasets", FORMATS, "test_trajectories_hold_the_whole_record"),
        ("every other format", RECORD, "test_a_format_made_of_the_trajectories_files_is_the_one_made_of_the_record"),
    ],
    "sft-tokens": [
        ("TRL `SFTTrainer`", TRL, "test_sft_on_labelled_tokens_trains_the_sampled_tokens_and_no_other"),
        ("verl's SFT trainer", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote"),
    ],
    "sft": [
        ("TRL `SFTTrainer`", TRL, "test_sft_on_messages"),
        ("verl's SFT trainer", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote"),
    ],
    "preference": [("TRL `DPOTrainer`", TRL, "test_dpo_on_pairs")],
    "kto": [("TRL `KTOTrainer`", TRL, "test_kto_on_labels")],
    "sharegpt": [("LLaMA-Factory", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote")],
    "verl-rl": [("verl's `RLHFDataset`", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote")],
    "atif": [("the published `atif` models", FORMATS, "test_atif_documents_pass_the_published_models")],
    "transitions": [("datasets", FORMATS, "test_every_file_loads_with_datasets")],
    "harbor": [("Harbor's `RolloutDetail`", FORMATS, HARBOR)],
    "verifiers": [("verifiers' `read_episodes`", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote")],
    "nemo-gym": [("NeMo Gym's models and reward profile", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote")],
    "trl-grpo": [("TRL `GRPOTrainer`", TRL, "test_grpo_replays_recorded_rollouts")],
    "slime": [
        ("`torch.load`; a copy of `Sample`'s field names", "test_slime.py", "test_a_file_holds_the_segments_as_samples")
    ],
    "skyrl-sft": [("SkyRL's SFT dataset", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote")],
    "skyrl-rl": [("SkyRL's `PromptDataset`", ENVIRONMENTS, "test_a_trainer_reads_what_we_wrote")],
}
"""Format → who reads it, and the file and name of the test that has it read."""


def table() -> str:
    lines = []
    for name, row in ROWS.items():
        exporter = exporter_named(name)
        files = ", ".join({"jsonl": "JSONL", "parquet": "Parquet", "pt": "`.pt`"}[each] for each in exporter.containers)
        mark = "" if exporter.faithful else "\\*"
        lines.append(f"* `{name}`{mark}: {row}; {files}; read by {', '.join(who for who, _, _ in READERS[name])}\n")
    return "".join(lines)


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
