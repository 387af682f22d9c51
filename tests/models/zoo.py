"""Models to capture whole: ten of the transformers library, small and random, and the examples.

No configuration has a padding token: with one, the models decide about masks on the tokens' data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.models import MODELS, build

VOCABULARY = 99
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "pad_token_id": None,
}
SMALL = {**TEXT, "bos_token_id": None, "eos_token_id": None}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 30,
    "patch_size": 2,
}
EFFICIENT = {"image_size": 32, "width_coefficient": 0.1, "depth_coefficient": 0.2, "hidden_dim": 32}


@dataclass(frozen=True)
class Model:
    """One model and how it is called.

    Attributes:
        name: readable test id.
        make: a model in evaluation mode, the same at every call.
        inputs: positional and keyword arguments; different data at each call.
        splits_in_training: in training mode it decides something on the data of a tensor.
        dispatched: how a replay's ATen operators differ from eager's all the same, see below.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    splits_in_training: bool = False
    dispatched: str = ""


# Eager reads a mask of ones that it has just made; no graph needs the result.
READS_A_CONSTANT = "-1 aten::_local_scalar_dense -1 aten::is_nonzero -1 aten::item"
# Eager calls scripted functions, where torch.tensor(8) is made of other operators.
SCRIPTED = "-4 aten::_to_copy -4 aten::copy_ +6 aten::detach_ +6 aten::empty -4 aten::empty_strided"


def tokens(batch: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(0, VOCABULARY - 3, (batch, length))


def images(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def again() -> nn.Module:
        torch.manual_seed(7)
        return make().eval()

    return again


def keywords(**makers: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    return lambda: ((), {name: make() for name, make in makers.items()})


def transformers_models() -> list[Model]:
    """BERT to Mamba; an empty list where the library is missing."""
    try:
        import transformers as hf
    except ImportError:
        return []
    hf.logging.set_verbosity_error()
    text = keywords(input_ids=tokens)
    both = keywords(input_ids=tokens, decoder_input_ids=tokens)
    two_towers = keywords(input_ids=tokens, pixel_values=lambda: images(30))

    def whisper() -> nn.Module:
        return hf.WhisperModel(
            hf.WhisperConfig(
                vocab_size=VOCABULARY,
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=4,
                decoder_ffn_dim=4,
                max_source_positions=30,
                pad_token_id=98,
                bos_token_id=97,
                eos_token_id=97,
                decoder_start_token_id=96,
            )
        )

    def deberta() -> nn.Module:
        relative = {"relative_attention": True, "pos_att_type": "c2p|p2c"}
        return hf.DebertaModel(hf.DebertaConfig(**TEXT, **relative, position_biased_input=False))

    def align() -> nn.Module:
        return hf.AlignModel(
            hf.AlignConfig(text_config=TEXT, vision_config=EFFICIENT, projection_dim=32)
        )

    def clip() -> nn.Module:
        return hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=VISION))

    def t5() -> nn.Module:
        sizes = {"d_model": 32, "d_ff": 37, "num_layers": 2, "num_heads": 4, "d_kv": 8}
        return hf.T5Model(hf.T5Config(vocab_size=VOCABULARY, **sizes))

    def gpt2() -> nn.Module:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        ends = {"bos_token_id": None, "eos_token_id": None}
        return hf.GPT2Model(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **ends))

    def mamba() -> nn.Module:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
        return hf.MambaModel(hf.MambaConfig(vocab_size=VOCABULARY, **sizes))

    rows: list[tuple[str, Callable[[], nn.Module], Any, dict[str, Any]]] = [
        ("BERT", lambda: hf.BertModel(hf.BertConfig(**TEXT)), text, {}),
        ("DeBERTa", deberta, text, {"dispatched": SCRIPTED}),
        (
            "ALIGN",
            align,
            keywords(input_ids=tokens, pixel_values=lambda: images(32)),
            {"dispatched": READS_A_CONSTANT},
        ),
        ("GPT-2", gpt2, text, {}),
        ("T5", t5, both, {}),
        ("Llama", lambda: hf.LlamaModel(hf.LlamaConfig(**SMALL)), text, {}),
        (
            "ViT",
            lambda: hf.ViTModel(hf.ViTConfig(**VISION)),
            keywords(pixel_values=lambda: images(30)),
            {},
        ),
        (
            "Whisper",
            whisper,
            keywords(input_features=lambda: torch.randn(2, 80, 60), decoder_input_ids=tokens),
            {"splits_in_training": True},
        ),
        ("CLIP", clip, two_towers, {}),
        ("Mamba", mamba, text, {}),
    ]
    return [Model(name, seeded(make), inputs, **more) for name, make, inputs, more in rows]


def example(name: str) -> Model:
    """One of the examples; other data are the first ones turned around, valid where those are."""
    turns = iter(range(1, 1000))

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        turn = next(turns)
        given = build(name)[1]
        # Batch norm in training needs more than one value a channel.
        whole = (torch.cat([value, value.flip(-1)]) for value in given)
        return tuple(value.roll(turn, -1) for value in whole), {}

    return Model(f"example {name}", lambda: build(name)[0], inputs)


TRANSFORMERS = transformers_models()
EXAMPLES = [example(name) for name in MODELS]
