"""A tiny policy made from nothing: a stock Qwen3 or Llama that knows a few dozen words.

It exists so that the whole machine, engine included, can be run and watched on two CPU cores. It has
some 100,000 weights and a word-level tokenizer (what stands between blanks is one token). Its chat
template appends only: the text of a longer chat starts with the text of a shorter one.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, nearest
from envs.frozenlake import WORDS

PAD, END, USER, AGENT, SYSTEM, UNKNOWN = "<pad>", "<end>", "<user>", "<agent>", "<system>", "<unk>"
SPECIAL = (PAD, END, USER, AGENT, SYSTEM, UNKNOWN)
ARCHITECTURES = ("qwen3", "llama")
HEAD_DIM = 32  # the smallest that the engine's attention kernels take on every platform
EMBEDDING_MULTIPLE = 32

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<agent> ' + message['content'] + ' <end> ' }}"
    "{%- elif message['role'] == 'system' -%}{{ '<system> ' + message['content'] + ' <end> ' }}"
    "{%- else -%}{{ '<user> ' + message['content'] + ' ' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<agent> ' }}{%- endif -%}"
)


def make_tiny(
    folder: Path,
    words: Sequence[str] = WORDS,
    architecture: str = "qwen3",
    hidden: int = 64,
    layers: int = 2,
    intermediate: int = 0,
    context: int = 512,
    init_std: float = 0.05,
    seed: int = 0,
) -> None:
    """Write a randomly initialised model with tokenizer, template and configuration to ``folder``.

    ``words`` is the vocabulary besides the special tokens; by default that of FrozenLake.
    ``hidden`` is a multiple of 32 (one attention head for every 32), ``intermediate`` is four
    times that unless given. The same arguments give the same bytes. Raises ConfigError for a value
    out of range.
    """
    vocabulary = [*SPECIAL, *words]
    twice = sorted({word for word in vocabulary if vocabulary.count(word) > 1})
    if twice or any(len(word.split()) != 1 for word in words):
        raise ConfigError(f"model.params.words must differ and hold no blanks (twice: {twice})")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model.params.architecture = {architecture!r} is unknown{nearest(architecture, ARCHITECTURES)}"
        )
    if hidden < HEAD_DIM or hidden % HEAD_DIM:
        raise ConfigError(f"model.params.hidden = {hidden!r}: must be a multiple of {HEAD_DIM}")
    if layers < 1:
        raise ConfigError(f"model.params.layers = {layers!r}: must be at least 1")
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported: never ask a hub
    shape: dict[str, Any] = {
        "vocab_size": -(-len(vocabulary) // EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE,
        "hidden_size": hidden,
        "intermediate_size": intermediate or 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "initializer_range": init_std,
        "pad_token_id": vocabulary.index(PAD),
        "eos_token_id": vocabulary.index(END),
        "bos_token_id": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _save_model(folder, architecture, shape, seed)
    _save_tokenizer(folder, vocabulary, context)


def _save_model(folder: Path, architecture: str, shape: dict[str, Any], seed: int) -> None:
    # Here, not above: only the process that makes a model pays for these.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(architecture, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=shape["eos_token_id"], pad_token_id=shape["pad_token_id"]
    )
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path, vocabulary: list[str], context: int) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=context
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
