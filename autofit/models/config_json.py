"""A Hugging Face config.json, in a directory or on the hub, read into a HuggingFaceModel.

Weights are never touched. Reading a config runs transformers' checks, and with permission code that
comes with the checkpoint, so anything can be raised on the way; each error is reported as one
sentence about the config.
"""

import json
import os
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, as_input_error, sentence, shown
from autofit.core.files import check_readable, expanded, read_text
from autofit.models.huggingface import HuggingFaceModel
from autofit.models.tasks.choice import chosen_task, remedy_for

# formats of checkpoints that transformers dequantises as it reads them
_DEQUANTISED = ("mxfp4", "fp8")
_MOST_BYTES, _MOST_PARTS = 2**24, 2**20  # of a config.json; layers, labels or frames
_SECONDS = 5.0  # to wait for an answer of a few hundred bytes, unless HF_HUB_ETAG_TIMEOUT is set


@dataclass(frozen=True)
class _Origin:
    """Where a config.json is read from."""

    path: str  # a directory or a hub id, as transformers takes it
    label: str  # of the file, in messages
    name: str  # of the model
    source: Mapping[str, Any]
    local: bool
    trust_remote_code: bool
    task: str | None  # as asked for
    fetched: bool = False  # from the hub; else from the cache alone


def is_hub_id(text: str) -> bool:
    """Whether the text has the form `organisation/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None


def check_weights(weights: str | Path) -> None:
    """Raise an InputError for what is neither a directory that can be read nor a hub id."""
    path = expanded(weights, "the path of the weights")
    if isinstance(weights, str) and is_hub_id(weights) and not path.exists():
        return

    check_readable(path, "the directory")
    if not path.is_dir():
        remedy = "Give the directory that it lies in, beside its config.json."
        raise InputError(f"{weights} is a file, and weights are read from a directory.", remedy)


def check_directory(path: str | Path) -> Path:
    """The whole path of a directory; an InputError unless it has a config.json that can be read.

    Loads no transformers. Whether the file is JSON is for transformers to report, but for what it
    does not expect.
    """
    path = expanded(path, "the directory of a model").resolve()
    file = path / "config.json"
    try:
        if not path.is_dir():
            raise InputError(f"the directory {path} is not there.", "Check the path.")
        content = json.loads(read_text(file, most=_MOST_BYTES))
    except (FileNotFoundError, IsADirectoryError) as error:
        message = f"the directory {path} holds no config.json."
        raise InputError(
            message, "Give the directory of a Hugging Face model, or the name of a preset."
        ) from error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.", "Check the file.") from error
    except (ValueError, RecursionError):
        return path

    if not isinstance(content, dict):  # transformers indexes a list before it checks
        raise InputError(
            f"{file} should hold a mapping, not {type(content).__name__}.", "Correct it."
        )

    return path


def read_directory(
    path: str | Path,
    *,
    task: str | None = None,
    trust_remote_code: bool = False,
) -> HuggingFaceModel:
    """The model that a directory's config.json describes, for the task that is asked for or,
    without one, that its class says.

    Raises:
        InputError: no config.json, one that cannot be read, a model that is not supported, or code
            that is not trusted.
    """
    path = check_directory(path)
    source = {"kind": "directory", "path": str(path)}

    return _read(
        _Origin(
            str(path),
            str(path / "config.json"),
            path.name,
            source,
            True,
            trust_remote_code,
            task,
        )
    )


def read_hub(
    model_id: str,
    *,
    task: str | None = None,
    trust_remote_code: bool = False,
) -> HuggingFaceModel:
    """The model of a hub id; only its config.json is fetched, from the cache where there is no
    network.

    Raises:
        InputError: the hub does not answer, it cannot be fetched, a model that is not supported, or
            code not trusted.
    """
    source = {"kind": "hub", "model": model_id}
    # The name is also that of the run directory, where the organisation's slash would be in the
    # way.
    name = model_id.rpartition("/")[2]
    fetched = answers_for(model_id)
    label = f"the config.json of {model_id}"

    return _read(
        _Origin(
            model_id,
            label,
            name,
            source,
            False,
            trust_remote_code,
            task,
            fetched,
        )
    )


def _read(origin: _Origin) -> HuggingFaceModel:
    from transformers import AutoConfig

    raw = _raw_config(origin)
    _check_raw(raw, origin)
    task = chosen_task(raw, origin.task, origin.label)
    with as_input_error(
        lambda error: f"{origin.label} describes no valid model: {sentence(error)}.", "Correct it."
    ):
        config = AutoConfig.from_pretrained(
            origin.path,
            trust_remote_code=origin.trust_remote_code,
            local_files_only=not origin.fetched,
        )
        given = config.to_dict()
        if raw.get("quantization_config"):  # of weights; the structure has none of it
            given["quantization_config"] = {
                **raw["quantization_config"],
                "dequantize": True,
            }
        model = HuggingFaceModel(
            origin.name,
            task,
            given,
            origin.source,
            origin.trust_remote_code,
        )
        _check_class(model, config, origin)
        model.transformers_config()  # as it is made again from here on

    return model


def _raw_config(origin: _Origin) -> Mapping[str, Any]:
    from transformers import PreTrainedConfig

    try:
        raw, _ = PreTrainedConfig.get_config_dict(origin.path, local_files_only=not origin.fetched)
    except Exception as error:
        if origin.local:
            message = f"{origin.label} cannot be read: {sentence(error)}."
            raise InputError(
                message, "Correct it, or write it again with save_pretrained."
            ) from error

        # transformers adds advice of several lines
        first = str(error).strip().partition("\n")[0].rstrip(".")
        message = (
            f"{origin.path} is no directory here, and its config.json cannot be fetched: {first}."
        )
        raise InputError(
            message, "Download the model and give its directory, or check the name."
        ) from error

    if not isinstance(raw, Mapping):  # fetched from the hub
        raise InputError(
            f"{origin.label} should hold a mapping, not {type(raw).__name__}.", "Correct it."
        )

    return raw


def _check_raw(raw: Mapping[str, Any], origin: _Origin) -> None:
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise InputError(
            f"{origin.label} has no model_type.", "Add the key, or write it with save_pretrained."
        )

    stored = raw.get("quantization_config")
    if stored and (
        not isinstance(stored, Mapping) or stored.get("quant_method") not in _DEQUANTISED
    ):
        message = f"{origin.label} is of a checkpoint that is already quantised."
        raise InputError(
            message,
            "Give the model it was made from; autofit quantises it itself where that is faster.",
        )

    if not isinstance(code := raw.get("auto_map") or {}, Mapping):
        raise InputError(
            f"{origin.label}: auto_map should be a mapping, not {shown(code)}.", "Correct it."
        )

    for key, count in _counts(raw):
        if count > _MOST_PARTS:
            raise InputError(f"{origin.label}: {key} cannot be {shown(count)}.", "Correct it.")

    if kind in CONFIG_MAPPING:
        return
    if "AutoConfig" not in code:
        message = f"{origin.label} has model_type {shown(kind)}, which this version of transformers does not know."
        raise InputError(message, "Install a newer transformers.")

    _check_trust(origin)


def _counts(raw: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers of layers, labels, frames, ...: transformers makes lists so long, however long."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif isinstance(value, int) and ("layer" in key or key.startswith("num_")):
            yield key, value


def _check_class(model: HuggingFaceModel, config: Any, origin: _Origin) -> None:
    """Refuse a config that transformers has no model of this task for."""
    import transformers

    auto = model.auto_class()
    if type(config) in getattr(transformers, auto)._model_mapping:
        return
    if auto not in (getattr(config, "auto_map", None) or {}):
        message = f"{origin.label}: transformers has no {auto} for {config.model_type}."
        raise InputError(message, remedy_for(config.model_type))

    _check_trust(origin)


def _check_trust(origin: _Origin) -> None:
    if not origin.trust_remote_code:
        message = (
            f"{origin.label} needs Python code that comes with the model, which is not run unasked."
        )
        raise InputError(message, "Look at that code, then add --trust-remote-code.")


def answers_for(model_id: str) -> bool:
    """Whether the hub answers for a model's config, if only that there is none; False: only the
    cache can be used.

    The hub's own client retries for minutes before it reports that nobody answers.

    Raises:
        InputError: it does not answer, and nothing of the model is in the cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return False
    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _SECONDS)
    errors: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    # In a thread that nobody waits for: looking up the name of a host can take longer than any
    # limit of a request.
    threading.Thread(target=lambda: errors.put(_ask(model_id, timeout)), daemon=True).start()
    try:
        error = errors.get(timeout=timeout)
    except queue.Empty:
        error = TimeoutError(f"no answer within {timeout:g} s")

    if error is None:
        return True
    if isinstance(try_to_load_from_cache(model_id, "config.json"), str):
        return False
    message = f"{constants.ENDPOINT} cannot be reached for the config.json of {model_id} ({sentence(error)})."
    remedy = "Check the network, or give a directory with that file; no weights are needed."
    raise InputError(message, remedy) from error


def _ask(model_id: str, timeout: float) -> Exception | None:
    """The error that kept the hub from answering; None where it answered."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(model_id, "config.json"), timeout=timeout)
    except HfHubHTTPError:  # an answer: no such model, or not for everybody
        return None
    except Exception as error:
        return error

    return None
