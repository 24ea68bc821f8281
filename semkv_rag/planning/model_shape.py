"""What of a model decides its KV's size and its prefill's cost, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semkv_rag.errors import OptionError

SLIDING = "sliding_attention"
"""What transformers calls layers with a window."""

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder whose KV of all tokens is kept.

    Attributes:
        name: as it was asked for.
        layers, heads, kv_heads: of its attention.
        head_dim: of its keys and values; the mean of both where they are made of latents.
        parameters: in matrices that a token is multiplied by, embeddings left out; of a mixture of
            experts those of the experts that a token takes.
        number_bytes: of one number of K or V.
        windowed: how many of the layers have a sliding window.
        window: of these, in tokens.
        latent: what is kept of a token for all heads in place of K and V (multi-head latent attention),
            in numbers: of the part that turns with the position, and of the latent. None for K and V.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    number_bytes: int
    windowed: int = 0
    window: int = 0
    latent: tuple[int, int] | None = None

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """`(kv_heads, head_dim)` of K and of V, as they are stored."""
        if self.latent is not None:
            turning, latent = self.latent
            return (1, turning), (1, latent)
        return (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        numbers = sum(heads * dim for heads, dim in self.kv_shapes)
        return self.layers * numbers * self.number_bytes

    @property
    def token_flops(self) -> int:
        """Operations for a token in all matrices: a multiplication and an addition for each parameter.

        Where layers have a window, its attention to a whole one counts here, whatever its position.
        """
        return 2 * self.parameters + self.windowed * self.window * self._layer_pair_flops

    @property
    def pair_flops(self) -> int:
        """Operations for a token's attention to one token before it, in layers without a window."""
        return (self.layers - self.windowed) * self._layer_pair_flops

    @property
    def _layer_pair_flops(self) -> int:
        """A score and a sum in each head."""
        return 4 * self.heads * self.head_dim


def model_shape(model: str, *, kv_dtype: str | None = None) -> ModelShape:
    """The shape of a model; its weights are not read.

    Args:
        model: a folder with a `config.json`, or a name on the hub.
        kv_dtype: of K and V; the model's own unless given.

    Raises:
        OptionError: there is no config, or its KV is not one K and one V for each token and layer.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise OptionError(f"{model} has no config that can be read: {error}") from error
    text = config.get_text_config(decoder=True)
    if kind := _other_cache(text):
        raise OptionError(f"{model} has {kind}: semkv-rag does not reuse its KV")
    heads = int(text.num_attention_heads)
    layers = int(text.num_hidden_layers)
    window = _window(text)
    return ModelShape(
        name=model,
        layers=layers,
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=_head_dim(text, heads),
        parameters=_parameters(text),
        number_bytes=_number_bytes(kv_dtype or str(text.dtype or "float32")),
        windowed=_windowed(text, layers) if window else 0,
        window=window,
        latent=(int(text.qk_rope_head_dim), int(text.kv_lora_rank)) if _has_latents(text) else None,
    )


def _has_latents(config: Any) -> bool:
    return bool(getattr(config, "kv_lora_rank", None))


def _head_dim(config: Any, heads: int) -> int:
    if _has_latents(config):
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return int(key_dim + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _other_cache(config: Any) -> str | None:
    """The kind of cache that is not K and V of every token, in words."""
    if _has_latents(config) and getattr(config, "index_topk", None):
        return "sparse multi-head latent attention"
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "attention", SLIDING}):
        return f"layers of {', '.join(others)}"
    if getattr(config, "num_attention_heads", None) is None:
        return "no attention"
    return None


def _window(config: Any) -> int:
    """The sliding window of the layers that have one, in tokens; 0 for none."""
    if not getattr(config, "use_sliding_window", True):
        return 0
    return int(getattr(config, "sliding_window", None) or 0)


def _windowed(config: Any, layers: int) -> int:
    """How many layers have the sliding window."""
    kinds = getattr(config, "layer_types", None)
    return layers if not kinds else list(kinds).count(SLIDING)


def _number_bytes(dtype: str) -> int:
    name = dtype.removeprefix("torch.")
    if name not in _BYTES:
        raise OptionError(f"dtype {dtype!r}: use {', '.join(_BYTES)}")
    return _BYTES[name]


def _parameters(config: Any) -> int:
    """Counted in the model as transformers builds it, without memory for its weights."""
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    experts = next(
        (
            int(count)
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if (count := getattr(config, name, None))
        ),
        1,
    )
    taken = int(getattr(config, "num_experts_per_tok", None) or 1) if experts > 1 else 1
    counted = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or "embed" in name:
            continue
        share = taken / experts if ".experts." in name else 1.0
        counted += weight.numel() * share
    return round(counted)
