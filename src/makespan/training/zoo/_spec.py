"""Small models: what is trained for real, described without torch."""

from dataclasses import dataclass

from makespan.errors import InputError, unknown_name

__all__ = ["MODEL_FAMILIES", "SmallModel"]

MODEL_FAMILIES = ("llama", "gpt", "bert", "t5", "vit")
"""Kinds of small models; each follows the layer structure of the model it is named after."""


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Sizes of a small transformer; an `InputError` names one out of range.

    Parameters
    ----------
    family
        One of `MODEL_FAMILIES`: ``llama`` (causal, RMSNorm, rotary positions, gated MLP), ``gpt``
        (causal, LayerNorm, learned positions), ``bert`` (bidirectional, masked tokens), ``t5``
        (encoder and decoder with cross attention) or ``vit`` (image patches, one class an image).
    n_layers
        Transformer layers; of ``t5``, half of them (rounded up) form the encoder.
    hidden, heads, kv_heads, ffn
        Width, attention heads, key-value heads and width of the MLP.
    seq
        Tokens a sample; image patches for ``vit``.
    vocab
        Tokens of the vocabulary; classes for ``vit``.
    patch_features
        Values an image patch (``vit`` only).
    """

    family: str
    n_layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 128
    seq: int = 32
    vocab: int = 64
    patch_features: int = 48

    def __post_init__(self) -> None:
        """Check family and sizes."""
        if self.family not in MODEL_FAMILIES:
            raise unknown_name("model family", self.family, MODEL_FAMILIES)
        for name in ("n_layers", "hidden", "heads", "kv_heads", "ffn", "patch_features"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: a whole number >= 1")
        for name in ("seq", "vocab", *(("n_layers",) if self.family == "t5" else ())):
            if getattr(self, name) < 2:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: a whole number >= 2")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise InputError(f"hidden {self.hidden} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")

    @property
    def n_encoder_layers(self) -> int:
        """Layers that belong to the encoder; 0 for models that have none apart from the decoder."""
        return (self.n_layers + 1) // 2 if self.family == "t5" else 0
