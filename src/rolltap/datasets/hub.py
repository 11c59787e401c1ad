"""Puts a finished dataset on the Hugging Face hub, as a private repository where there is none yet."""

from __future__ import annotations

from pathlib import Path

from rolltap.errors import DatasetError
from rolltap.extras import install_line


def check_token() -> None:
    """Raises `DatasetError` where no token is set, before an export is made for nothing."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise DatasetError(f"--push needs huggingface_hub: {install_line('export')}") from None
    if not get_token():
        raise DatasetError("--push: no token; set HF_TOKEN, or log in by `hf auth login`")


def push(folder: Path, repository: str) -> str:
    """Uploads the folder in one commit; its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder, repo_id=repository, repo_type="dataset", commit_message="rolltap export"
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DatasetError(f"--push: {repository}: {error}; the dataset is in {folder}") from error
    return str(done.commit_url)
