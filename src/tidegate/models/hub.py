"""Models by their id on Hugging Face's hub: from the local cache, or downloaded into it. Needs no torch."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tidegate.base.errors import ModelError

ANSWER_S = 5.0  # that the hub has to say whether it knows a model, before anything is downloaded


def snapshot(model_id: str, patterns: Sequence[str], complete: Callable[[Path], bool]) -> Path:
    """The directory with the files of ``model_id`` that match ``patterns``: the local cache's where ``complete(it)``,
    without asking the network. Raises ModelError, within seconds where the hub can't be reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(model_id, allow_patterns=list(patterns), local_files_only=True))
        if complete(cached):
            return cached
    except HFValidationError as error:
        raise ModelError(
            f"{model_id!r} is neither a path that exists nor a model id of the form 'owner/name'."
        ) from error
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(model_id, timeout=ANSWER_S)  # asks once, while downloads try again for half a minute
        return Path(snapshot_download(model_id, allow_patterns=list(patterns)))
    except Exception as error:  # the HTTP client's, which is another one in each version of huggingface_hub
        raise ModelError(
            f"{model_id!r} is neither a path that exists nor in the local cache, and it can't be had from the hub: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
