"""What parity reports compare: transformers' own full forward, and the engine's cached prefill and decode."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpact.contract.sources.huggingface import override_config, read_config
from kvpact.engine.engine import Engine
from kvpact.engine.model import HostedModel
from kvpact.engine.requests import EngineEvent, SequenceFailed, SequenceRequest, TokenComputed
from kvpact.engine.trace import StateRecorder
from kvpact.kvcache.paged_cache import TORCH_DTYPES
from kvpact.types import Dtype, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run: what attention saw by layer and position, the model's logits [n, vocabulary], its tokens."""

    attention: StateRecorder
    logits_nV: torch.Tensor
    token_ids: tuple[int, ...]


class Reference:
    """A model as its authors wrote it: own rotary module, own eager attention, no cache."""

    def __init__(self, model: HostedModel) -> None:
        self._model = model

    @classmethod
    def load(
        cls,
        folder: Path,
        override: Mapping[str, Any],
        compute_dtype: Dtype = Dtype.FLOAT32,
        device: str = "cpu",
    ) -> Reference:
        """Loads the model anew, so that nothing of the engine is in it. May raise UnreadableSource."""
        config = override_config(read_config(folder), override)
        return cls(HostedModel.load(folder, config, TORCH_DTYPES[compute_dtype], torch.device(device)))

    def trace(self, token_ids: Sequence[int], positions: Iterable[int]) -> Trace:
        """One full forward over all tokens, watched at `positions`, each in [0, tokens); logits of these rows
        in ascending order.

        `token_ids` of the result are the greedy successors of the watched positions.
        """
        watched = sorted(set(positions))
        recorder = StateRecorder(frozenset(watched))
        rows = torch.tensor(watched, device=self._model.device)
        logits_nV = self._model.own_forward(list(token_ids), list(range(len(token_ids))), recorder, rows)
        picked = tuple(logits_nV.argmax(dim=-1).tolist())
        return Trace(attention=recorder, logits_nV=logits_nV.float(), token_ids=picked)


def engine_trace(engine: Engine, token_ids: Sequence[int], output_tokens: int) -> Trace:
    """Prefill and `output_tokens` greedy tokens on a started engine, watched from the prompt's last token on.

    End tokens are ignored. Raises the KvpactError with which the sequence failed, if it does.
    """
    recorder = StateRecorder(frozenset(range(len(token_ids) - 1, len(token_ids) + output_tokens)))
    return run_traced(
        engine,
        SequenceRequest(
            token_ids=tuple(token_ids),
            sampling=Sampling(max_output_tokens=output_tokens, ignore_eos=True),
            table_length=len(token_ids) + output_tokens,
            want_logits=True,
            recorder=recorder,
        ),
        recorder,
    )


def run_traced(engine: Engine, request: SequenceRequest, recorder: StateRecorder) -> Trace:
    """Runs a request with `want_logits`, for example one that goes on from handed-over blocks, to its end."""
    events: list[EngineEvent] = []
    done = threading.Event()

    def on_event(event: EngineEvent) -> None:
        events.append(event)
        if isinstance(event, SequenceFailed) or (isinstance(event, TokenComputed) and event.finish_reason):
            done.set()

    engine.submit(request, on_event)
    done.wait()
    failed = next((event for event in events if isinstance(event, SequenceFailed)), None)
    if failed is not None:
        raise failed.error
    tokens = [event for event in events if isinstance(event, TokenComputed)]
    logits = [event.logits for event in tokens if event.logits is not None]
    return Trace(
        attention=recorder, logits_nV=torch.stack(logits), token_ids=tuple(event.token_id for event in tokens)
    )
