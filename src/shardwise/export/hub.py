"""Pushes an exported model to a hub; the token comes from the environment or the hub's own login, from nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.core.errors import UserError

PRIVATE = ["shardwise_run.json"]  # the whole config, with the paths of whoever trained; the card has what matters of it


def check_hub(repo: str) -> Any:
    """Returns the hub's API, logged in; raises UserError before anything is exported if a push cannot work."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError("--push", repo, "is no name of a repository", "write owner/name") from None
    if repo.count("/") != 1:
        raise UserError("--push", repo, "is no name of a repository", "write owner/name")
    if constants.is_offline_mode():
        raise UserError("--push", repo, "HF_HUB_OFFLINE is set", "unset it, or leave --push out")
    if get_token() is None:
        raise UserError("--push", repo, "you are not logged in", "set HF_TOKEN, or run: hf auth login")
    api = HfApi()
    _call_hub(repo, "the token was not accepted", api.whoami)
    return api


def push(api: Any, exported: Path, repo: str, private: bool, card: str | None = None) -> str:
    """Uploads a folder, or one file with a card beside it; returns the URL."""

    def upload() -> None:
        api.create_repo(repo, private=private, exist_ok=True)
        if exported.is_dir():
            api.upload_folder(
                repo_id=repo,
                folder_path=exported,
                commit_message="Model exported by shardwise",
                ignore_patterns=PRIVATE,
            )
            return
        api.upload_file(path_or_fileobj=exported, path_in_repo=exported.name, repo_id=repo)
        if card is not None:
            api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo)

    _call_hub(repo, "the upload failed; the export itself is done", upload)
    return f"{api.endpoint}/{repo}"


def _call_hub(repo: str, problem: str, call: Callable[[], Any]) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        call()
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        remedy = "check the token (hf auth whoami)" if status == 401 else "check that the token may write there"
        raise UserError("--push", repo, f"{problem} ({_first(error)})", remedy) from None
    except (OSError, ValueError) as error:  # offline; a login file that cannot be read
        raise UserError(
            "--push", repo, f"{problem} ({_first(error)})", "check the connection and HF_ENDPOINT"
        ) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "requests"):
            raise
        raise UserError("--push", repo, f"the hub cannot be reached ({_first(error)})",
                        "check the connection and HF_ENDPOINT") from None  # fmt: skip


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
