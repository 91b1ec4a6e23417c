"""A model folder without a model, for timed twins: a tokenizer in which each word is one token.

Its words are those of the ``load`` environment. Beside the tokenizer lie a ``config.json`` with the numbers
that every process checks, and a weights file with one number, since a folder without weights is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tokenizers

from cluster.weights_file import write_weights
from deploy.tiny import END, PAD, SPECIAL, TEMPLATE, UNKNOWN
from envs.load import MEMBERS, WORDS


def make_tokens(folder: Path, context: int = 1 << 20) -> None:
    """Write the folder. ``context`` is the longest prompt and reply together, in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [*SPECIAL, *MEMBERS, *WORDS]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    core.save(str(folder / "tokenizer.json"))
    settings = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN, "chat_template": TEMPLATE}
    _write(folder / "tokenizer_config.json", settings)
    _write(folder / "generation_config.json", {"eos_token_id": vocabulary.index(END)})
    facts = {"vocab_size": len(vocabulary), "max_position_embeddings": context, "model_type": "twin"}
    _write(folder / "config.json", facts)
    write_weights(folder / "model.safetensors", {"nothing": np.zeros(1, np.float32)})


def _write(path: Path, tree: Mapping[str, object]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n")
