"""A tool-calling model of under a million parameters, made here: its tokenizer, its warm start and its tasks."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "weights"
"""The committed model, a Hugging Face folder."""
