"""Whether the hub answers, asked once and briefly: its own client tries for minutes before it says that it does not."""

from __future__ import annotations

import os
import queue
import threading

from autofit.core.errors import InputError

_SECONDS = 5.0  # for an answer of a few hundred bytes; HF_HUB_ETAG_TIMEOUT says otherwise


def answers_for(model_id: str) -> bool:
    """Whether the hub says anything of a model's config, if only that there is none; False: there is the cache alone.

    Raises:
        InputError: it does not answer, and nothing of the model is in the cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return False
    error = _error_in_time(model_id)
    if error is None:
        return True
    if isinstance(try_to_load_from_cache(model_id, "config.json"), str):
        return False
    said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    message = f"{constants.ENDPOINT} cannot be reached for the config.json of {model_id} ({said})."
    remedy = "Check the network, or give a directory with that file; no weights are needed."
    raise InputError(message, remedy) from error


def _error_in_time(model_id: str) -> Exception | None:
    """What kept the hub from answering; None where it did."""
    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _SECONDS)
    found: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    # In a thread that nobody waits for: looking up the name of a host can take longer than any limit of a request.
    threading.Thread(target=lambda: found.put(_asked(model_id, patience)), daemon=True).start()
    try:
        return found.get(timeout=patience)
    except queue.Empty:
        return TimeoutError(f"no answer within {patience:g} s")


def _asked(model_id: str, patience: float) -> Exception | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(model_id, "config.json"), timeout=patience)
    except HfHubHTTPError:  # an answer: no such model, or not for everybody
        return None
    except Exception as error:
        return error
    return None
