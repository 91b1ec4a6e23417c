"""What engine, learner and driver must know of a model folder before they load it."""

from pathlib import Path

import msgspec

from cluster.errors import ConfigError


def check_folder(path: Path) -> int:
    """The model's vocabulary size. Raises ConfigError when ``path`` is not a usable model folder."""
    if not path.is_dir():
        raise ConfigError(f"model folder {path} does not exist")
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ConfigError(f"model folder {path} lacks config.json or *.safetensors")
    return int(msgspec.json.decode((path / "config.json").read_bytes())["vocab_size"])


def tokenizer_size(path: Path) -> int:
    """Highest token id + 1 of the folder's ``tokenizer.json``, or 0 without one."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return 0
    tree = msgspec.json.decode(file.read_bytes())
    vocabulary = tree["model"]["vocab"]  # a list (Unigram) or a mapping to ids
    highest = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    added = (token["id"] for token in tree.get("added_tokens", ()))
    return 1 + max(int(number) for number in (highest, *added))


def ids_in_use(path: Path) -> int:
    """How many ids may occur: the tokenizer's, which must fit the model's vocabulary.

    Engine and learner both mask the rows of a padded embedding beyond it. Raises ConfigError when
    the tokenizer has ids that the model does not know.
    """
    model, tokenizer = check_folder(path), tokenizer_size(path)
    if tokenizer > model:
        raise ConfigError(
            f"model folder {path}: the tokenizer has ids up to {tokenizer - 1}, "
            f"the model's vocabulary ends at {model - 1}"
        )
    return tokenizer or model
