"""The engine's tokens and logits are those of transformers' own generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes import load_engine, make_request, make_tiny_model, prompt_of, run_by_hand

FAMILIES = [("llama", "default"), ("llama", "llama3"), ("qwen3", "default"), ("qwen3", "llama3")]
LENGTHS = [1, 15, 16, 17, 31, 33, 50, 2048]
LOGIT_TOLERANCE = 1e-4


def generate(folder: Path, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers' own greedy tokens, end tokens ignored, and logits [tokens, vocabulary] of every step."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), rope="llama3")


@pytest.mark.parametrize(("model_type", "rope"), FAMILIES)
def test_tokens_and_logits_equal_those_of_transformers_at_every_length(
    tmp_path: Path, model_type: str, rope: str
) -> None:
    folder = make_tiny_model(tmp_path, model_type=model_type, rope=rope)
    engine = load_engine(folder)
    for length in LENGTHS:
        tokens, logits = generate(folder, prompt_of(length), 64)
        (ours,) = run_by_hand(engine, make_request(prompt_of(length), 64))
        assert ours.token_ids == tokens
        assert (ours.logits - logits).abs().max() < LOGIT_TOLERANCE
    assert engine.counters().computed_output_tokens == 63 * len(LENGTHS)
    assert engine.pool.counts().free == engine.pool.total


@pytest.mark.parametrize("key_state", ["raw", "rotated"])
@pytest.mark.parametrize("axis_order", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 24])
@pytest.mark.parametrize("stored_lane_order", ["half_split", "adjacent"])
def test_every_form_of_the_cache_gives_the_same_tokens(
    llama: Path, key_state: str, axis_order: str, block_size: int, stored_lane_order: str
) -> None:
    engine = load_engine(
        llama,
        key_state=key_state,
        axis_order=axis_order,
        block_size=block_size,
        stored_lane_order=stored_lane_order,
        prefill_chunk_tokens=20,
    )
    for length in (1, 17, 47):
        tokens, logits = generate(llama, prompt_of(length), 16)
        (ours,) = run_by_hand(engine, make_request(prompt_of(length), 16))
        assert ours.token_ids == tokens
        assert (ours.logits - logits).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_prompt_in_chunks_gives_the_tokens_of_a_whole_one(llama: Path, chunk: int) -> None:
    tokens, logits = generate(llama, prompt_of(40), 16)
    engine = load_engine(llama, prefill_chunk_tokens=chunk)
    (ours,) = run_by_hand(engine, make_request(prompt_of(40), 16))
    assert ours.token_ids == tokens
    assert (ours.logits - logits).abs().max() < LOGIT_TOLERANCE
    assert engine.counters().forward_steps == -(-40 // chunk) + 15


def test_sliding_layers_see_their_window_of_positions_only(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path,
        model_type="qwen3",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    engine = load_engine(folder, prefill_chunk_tokens=5)
    for length in (5, 7, 8, 9, 16, 17, 40):
        tokens, logits = generate(folder, prompt_of(length), 16)
        (ours,) = run_by_hand(engine, make_request(prompt_of(length), 16))
        assert ours.token_ids == tokens
        assert (ours.logits - logits).abs().max() < LOGIT_TOLERANCE


def test_an_override_of_theta_changes_what_runs(llama: Path) -> None:
    (plain,) = run_by_hand(load_engine(llama), make_request(prompt_of(40), 16))
    (turned,) = run_by_hand(load_engine(llama, override={"rope_theta": 1e6}), make_request(prompt_of(40), 16))
    assert (plain.logits[0] - turned.logits[0]).abs().max() > 0.01


def test_bfloat16_cache_rounds_what_float32_computes(llama: Path) -> None:
    (exact,) = run_by_hand(load_engine(llama), make_request(prompt_of(40), 1))
    (rounded,) = run_by_hand(load_engine(llama, dtype="bfloat16"), make_request(prompt_of(40), 1))
    gap = (exact.logits - rounded.logits).abs().max()
    assert 1e-4 < gap < 0.5


def test_bfloat16_compute_passes_its_self_check_and_runs(llama: Path) -> None:
    (ours,) = run_by_hand(load_engine(llama, compute_dtype="bfloat16"), make_request(prompt_of(40), 8))
    assert len(ours.token_ids) == 8
