"""What an engine must know of a model folder before it starts."""

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
    if not (path / "tokenizer.json").is_file():
        return 0
    from tokenizers import Tokenizer

    return 1 + max(Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab().values())
