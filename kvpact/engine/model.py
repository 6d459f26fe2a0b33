"""A transformers model whose rotation and attention are taken over, and which can still run as written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvpact.contract.identity_tokenizer import vocabulary_size
from kvpact.engine.trace import Attended, Recorder
from kvpact.errors import UnreadableSource

if TYPE_CHECKING:
    from kvpact.engine.batch import Step

FAMILIES = ("llama", "qwen3")
OURS, OWN = "kvpact", "kvpact_own"


class IdentityRotary(torch.nn.Module):
    """Stands in for a model's rotary module: cos 1 and sin 0, so that attention receives raw q and k."""

    def __init__(self, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._cos = torch.ones((1, 1, rotary_dim), dtype=dtype, device=device)
        self._sin = torch.zeros((1, 1, rotary_dim), dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives (cos, sin), both [1, 1, R] and the same for every position and layer type."""
        return self._cos, self._sin


class HostedModel:
    """Weights and definition of one model in evaluation mode on one device."""

    def __init__(self, network: Any, vocab_size: int) -> None:
        decoder = network.get_decoder()
        self.network = network
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        self.vocab_size: int = vocab_size
        """Token ids that mean something; rows behind them pad the embedding and are never picked."""
        self.layer_count: int = network.config.num_hidden_layers
        self._decoder = decoder
        self._own_rotary = decoder.rotary_emb

    @classmethod
    def load(
        cls, folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> HostedModel:
        """Loads safetensors of `folder` under `config`, which is the folder's own with overrides applied.

        Raises:
            UnreadableSource: the family isn't served, or the folder has no safetensors.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UnreadableSource(
                f"{folder}: model_type {family!r} isn't served; served are {', '.join(FAMILIES)}",
                source=str(folder),
                key="model_type",
            )
        try:
            network = AutoModelForCausalLM.from_pretrained(
                folder,
                config=CONFIG_MAPPING[family].from_dict(config),
                dtype=dtype,
                attn_implementation=OURS,
                use_safetensors=True,
            )
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise UnreadableSource(
                f"{folder}: its weights don't fit its config, overrides included: {error}", source=str(folder)
            ) from error
        rows: int = network.config.vocab_size
        known = vocabulary_size(folder)
        return cls(
            network.eval().requires_grad_(False).to(device), rows if known is None else min(rows, known)
        )

    def take_over_rotation(self, rotary_dim: int) -> None:
        """From here on `forward` hands raw q and k to attention."""
        self._decoder.rotary_emb = IdentityRotary(rotary_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Runs one packed step, attention included; logits [kept rows, vocabulary] in the compute dtype."""
        output = self.network(
            input_ids=step.token_ids_1T,
            position_ids=step.positions_1T,
            use_cache=False,
            logits_to_keep=step.kept_rows,
            kvpact_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def own_forward(
        self,
        token_ids: list[int],
        positions: list[int],
        recorder: Recorder | None = None,
        kept_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The model's own eager forward without a cache, rotary module and mask as its authors have them.

        Logits [T, vocabulary], or those of `kept_rows`. Positions may jump; a token sees those up to its own.
        """
        positions_1T = torch.tensor([positions], device=self.device)
        with self._as_authored():
            output = self.network(
                input_ids=torch.tensor([token_ids], device=self.device),
                position_ids=positions_1T,
                attention_mask=self._own_masks(positions_1T[0]),
                use_cache=False,
                logits_to_keep=0 if kept_rows is None else kept_rows,
                kvpact_recorder=recorder,
                kvpact_positions=positions_1T[0],
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _own_masks(self, positions_T: torch.Tensor) -> Any:
        config = self.network.config
        distance_TT = positions_T[:, None] - positions_T[None, :]
        full = self._additive(distance_TT >= 0)
        window = getattr(config, "sliding_window", None)
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return full
        if window is None:
            return {"full_attention": full, "sliding_attention": full}
        sliding = self._additive((distance_TT >= 0) & (distance_TT < window))
        return {"full_attention": full, "sliding_attention": sliding}

    def _additive(self, visible_TT: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible_TT.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill(~visible_TT, torch.finfo(self.dtype).min)[None, None]

    @contextmanager
    def _as_authored(self) -> Iterator[None]:
        taken_over = self._decoder.rotary_emb
        self._decoder.rotary_emb = self._own_rotary
        self.network.set_attn_implementation(OWN)
        try:
            yield
        finally:
            self._decoder.rotary_emb = taken_over
            self.network.set_attn_implementation(OURS)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kvpact_step: Step,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    out_TQD = kvpact_step.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return out_TQD[None], None


def _own_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    kvpact_recorder: Recorder | None,
    kvpact_positions: torch.Tensor,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    result: tuple[torch.Tensor, torch.Tensor] = eager(
        module, query, key, value, attention_mask, scaling=scaling, **rest
    )
    if kvpact_recorder is not None:
        layer: Any = module.layer_idx
        kvpact_recorder.record(
            Attended(
                layer=layer,
                query_positions_T=kvpact_positions,
                q_TQD=query[0].transpose(0, 1),
                key_positions_n=kvpact_positions,
                k_nHD=key[0].transpose(0, 1),
                v_nHD=value[0].transpose(0, 1),
                out_TQD=result[0][0],
                scale=scaling,
            )
        )
    return result


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks come from positions and block tables, so the model builds none."""


AttentionInterface.register(OURS, _attention)
AttentionInterface.register(OWN, _own_attention)
AttentionMaskInterface.register(OURS, _no_mask)
AttentionMaskInterface.register(OWN, _no_mask)
