"""Tensors into a safetensors file; what the disk refuses is an OSError, as of any other file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors. Raises OSError where the disk refuses: the library has an error of its own."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), str(error), str(path)) from error
