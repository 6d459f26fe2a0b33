"""What the coordinator reads of a model folder, the same as transformers reads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from coordinator.model_folder import ModelText
from kvpact.contract.json_file import CONFIG_CAP_BYTES, DEEPEST
from kvpact.errors import BadRequest, UnreadableSource
from tests.coordinator_fakes import TOKENS, VOCAB_SIZE, make_text_folder


def changed(folder: Path, name: str, **changes: Any) -> Path:
    """The folder with some keys of one of its JSON files set."""
    path = make_text_folder(folder) / name
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder


def test_numbers_come_from_the_configs(tmp_path: Path) -> None:
    model = ModelText(make_text_folder(tmp_path, context=77))
    assert (model.context, model.vocabulary) == (77, TOKENS)


def test_token_ids_are_those_that_both_the_model_and_the_tokenizer_know(tmp_path: Path) -> None:
    for vocab_size, vocabulary in ((VOCAB_SIZE, TOKENS), (TOKENS - 9, TOKENS - 9)):
        assert ModelText(changed(tmp_path, "config.json", vocab_size=vocab_size)).vocabulary == vocabulary
    folder = make_text_folder(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<added>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert ModelText(folder).vocabulary == TOKENS + 1


def test_a_normalizer_may_compose_characters_before_they_are_tokens(tmp_path: Path) -> None:
    folder = make_text_folder(tmp_path)
    assert ModelText(folder).characters_per_token == len("<|endoftext|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert ModelText(folder).characters_per_token == 4 * len("<|endoftext|>")


def test_other_threads_run_while_a_long_text_is_tokenised(tmp_path: Path) -> None:
    model = ModelText(make_text_folder(tmp_path))
    thread = threading.Thread(target=model.encode, args=("word and more, " * 15_000,))
    thread.start()
    started = last = time.perf_counter()
    longest = 0.0
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < (time.perf_counter() - started) / 2


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", ["many", 0, -1, 1.5, True, [7]])
def test_a_size_that_is_no_positive_integer_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UnreadableSource, match=key) as refusal:
        ModelText(changed(tmp_path, "config.json", **{key: value}), max_model_len=40)
    assert refusal.value.key == key


def test_a_model_without_a_vocabulary_size_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match="no vocab_size"):
        ModelText(changed(tmp_path, "config.json", vocab_size=None))


@pytest.mark.parametrize(
    ("settings", "around"),
    [
        ({}, lambda ids: ids),
        ({"add_bos_token": True}, lambda ids: (0, *ids)),
        ({"add_bos_token": True, "add_eos_token": True}, lambda ids: (0, *ids, 0)),
        ({"add_bos_token": False}, lambda ids: ids),
    ],
)
def test_special_tokens_are_added_as_the_tokenizer_config_says(
    tmp_path: Path, settings: dict[str, bool], around: Any
) -> None:
    model = ModelText(changed(tmp_path, "tokenizer_config.json", **settings))
    plain = model.encode("ab", add_special_tokens=False)
    assert len(plain) == 2
    assert model.encode("ab") == around(plain)


def test_a_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "D{{ messages|length }}"}, {"name": "tool", "template": "T"}]
    for template in ("D{{ messages|length }}", listed):
        folder = changed(tmp_path, "tokenizer_config.json", chat_template=template)
        (folder / "chat_template.jinja").unlink()
        assert ModelText(folder).render_chat([{}], add_generation_prompt=True, variables={}) == "D1"


def test_a_special_token_may_be_an_object(tmp_path: Path) -> None:
    folder = changed(
        tmp_path, "tokenizer_config.json", bos_token={"content": "<|im_start|>"}, add_bos_token=True
    )
    assert ModelText(folder).encode("a")[0] == 1


def test_max_model_len_shortens_the_context_and_may_not_pass_the_models(tmp_path: Path) -> None:
    folder = make_text_folder(tmp_path, context=77)
    assert ModelText(folder, max_model_len=40).context == 40
    with pytest.raises(BadRequest, match="78, but the model has 77"):
        ModelText(folder, max_model_len=78)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = make_text_folder(tmp_path)
    (folder / name).unlink()
    with pytest.raises(UnreadableSource, match=name):
        ModelText(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = make_text_folder(tmp_path)
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(UnreadableSource):
        ModelText(folder)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json", "config.json"):
        folder = make_text_folder(tmp_path / name)
        (folder / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UnreadableSource, match=name.partition(".")[0].replace("_", ".")):
            ModelText(folder)


@pytest.mark.parametrize("template", [7, {"default": "x"}, ["x"], [{"name": "default"}]])
def test_a_template_of_another_form_is_named(tmp_path: Path, template: Any) -> None:
    folder = changed(tmp_path, "tokenizer_config.json", chat_template=template)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UnreadableSource, match="chat template"):
        ModelText(folder)


def test_a_model_without_a_length_needs_one_from_the_settings(tmp_path: Path) -> None:
    folder = changed(tmp_path, "config.json", max_position_embeddings=None)
    with pytest.raises(UnreadableSource, match="set max_model_len"):
        ModelText(folder)
    assert ModelText(folder, max_model_len=50).context == 50


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b" " * CONFIG_CAP_BYTES + b"{}", "more than 32 MiB"),
        (b'{"a":' * (DEEPEST + 1) + b"1" + b"}" * (DEEPEST + 1), "deep"),
        (b"[]", "no JSON object"),
        (b"{", "isn't JSON"),
        (b'{"a": "\xff"}', "can't read"),
    ],
    ids=["huge", "deep", "list", "cut", "bytes"],
)
def test_a_file_beyond_bounds_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (make_text_folder(tmp_path) / name).write_bytes(content)
    with pytest.raises(UnreadableSource, match=says) as refusal:
        ModelText(tmp_path)
    assert refusal.value.source == str(tmp_path / name)
