"""Text from tokens that come one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.detokenize import ByteLevelDetokenizer, ByteLevelVocabulary, Detokenizer, WindowDetokenizer
from tests.coordinator_fakes import SPECIAL, make_text_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_text_folder(tmp_path_factory.mktemp("text"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def both(tokenizer: Tokenizer) -> list[Detokenizer]:
    """The exact detokenizer for byte-level vocabularies and the general one."""
    vocabulary = ByteLevelVocabulary(tokenizer)
    return [
        ByteLevelDetokenizer(vocabulary, skip_special=True),
        WindowDetokenizer(tokenizer, (), skip_special=True),
    ]


def streamed(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Pieces of text when tokens come in groups of these sizes, the flush last."""
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("text", ["🙂", "안녕하세요", "e\u0301a\u0308", "naïve 🙂🙂 ok", "日本\n語", " x  y"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_character_split_over_tokens_comes_out_whole(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text).ids
    for detokenizer in both(tokenizer):
        pieces = streamed(detokenizer, ids, [size] * len(ids))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_nothing_is_shown_of_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂").ids
    for detokenizer in both(tokenizer):
        assert [detokenizer.push([token]) for token in ids] == ["", "", "", "🙂"]


def test_a_cut_tail_is_flushed_once_as_one_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂").ids[:-1]
    for detokenizer in both(tokenizer):
        assert detokenizer.push(ids) == "a"
        assert detokenizer.flush() == "\ufffd"


def test_special_tokens_leave_no_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("a").ids, 2]
    for detokenizer in both(tokenizer):
        assert detokenizer.push(ids) + detokenizer.flush() == "a"
    shown = ByteLevelDetokenizer(ByteLevelVocabulary(tokenizer), skip_special=False)
    assert shown.push(ids) == f"{SPECIAL[1]}a{SPECIAL[2]}"


def test_a_token_without_text_is_silent(tokenizer: Tokenizer) -> None:
    for detokenizer in both(tokenizer):
        assert detokenizer.push([263]) + detokenizer.flush() == ""


@given(data=st.lists(st.integers(3, 258), max_size=40), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_any_bytes_in_any_groups_give_the_decoding_of_all_at_once(
    tokenizer: Tokenizer, data: list[int], sizes: list[int]
) -> None:
    detokenizer = ByteLevelDetokenizer(ByteLevelVocabulary(tokenizer), skip_special=True)
    assert "".join(streamed(detokenizer, data, sizes)) == tokenizer.decode(data)


@given(text=st.text(max_size=30), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_any_text_survives_the_general_detokenizer(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text).ids
    detokenizer = WindowDetokenizer(tokenizer, (), skip_special=True)
    assert "".join(streamed(detokenizer, ids, sizes)) == tokenizer.decode(ids)


def test_a_decoder_that_strips_the_first_space_keeps_the_one_after_the_prompt() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁end": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    detokenizer = WindowDetokenizer(tokenizer, [0], skip_special=True)
    assert detokenizer.push([1]) + detokenizer.push([1]) + detokenizer.flush() == " end end"
