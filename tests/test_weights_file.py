"""The weights file: the safetensors library reads what we write, and damage is found."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file

from cluster.weights_file import checksum_bytes, checksum_file, read_entries, read_header, write_weights


def test_the_library_reads_our_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(3, 5).to(torch.bfloat16),
        "a": torch.randn(7),
        "half": torch.randn(2, 2).half(),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    nbytes, checksum = write_weights(tmp_path / "w", tensors)
    assert nbytes == (tmp_path / "w").stat().st_size
    assert checksum == checksum_file(tmp_path / "w") == checksum_bytes((tmp_path / "w").read_bytes())
    read = load_file(tmp_path / "w")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["w"], "no partial file is left"


def test_numpy_arrays_are_written_too(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array([1, 2], dtype=np.int32)}
    write_weights(tmp_path / "w", arrays)
    read = load_numpy(tmp_path / "w")
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())


def test_we_read_the_library_s_file(tmp_path: Path) -> None:
    save_file({"p": torch.ones(2, 3), "q": torch.ones(4).bfloat16()}, tmp_path / "w", {"format": "pt"})
    found = {e.name: (e.dtype, e.shape) for e in read_header(tmp_path / "w")}
    assert found == {"p": ("float32", (2, 3)), "q": ("bfloat16", (4,))}


def test_every_flipped_bit_changes_the_checksum(tmp_path: Path) -> None:
    _, checksum = write_weights(tmp_path / "w", {"x": torch.arange(4.0)})
    data = bytearray((tmp_path / "w").read_bytes())
    for position in range(len(data)):
        data[position] ^= 1
        assert checksum_bytes(data) != checksum
        data[position] ^= 1


def test_cut_files_are_refused_at_every_length(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", {"x": torch.arange(4.0), "y": torch.ones(3)})
    data = (tmp_path / "w").read_bytes()
    assert len(read_entries(data)) == 2
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"safetensors|tensor|header"):
            read_entries(data[:length])
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(SafetensorError):
            load_file(tmp_path / "cut")


def test_unfit_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor t is not contiguous"):
        write_weights(tmp_path / "w", {"t": torch.ones(2, 3).T})
    with pytest.raises(ValueError, match="tensor c has dtype complex64"):
        write_weights(tmp_path / "w", {"c": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="tensor m is on meta"):
        write_weights(tmp_path / "w", {"m": torch.ones(1, device="meta")})
    assert list(tmp_path.iterdir()) == []
