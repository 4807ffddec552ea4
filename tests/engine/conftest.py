"""Kernels run compiled where there is a GPU, else in Triton's interpreter, chosen before Triton is imported."""

import os
import sys
from pathlib import Path

import pytest
import torch

if "triton" not in sys.modules and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of a kernel's test live."""
    if _IS_INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def is_interpreted() -> bool:
    return _IS_INTERPRETED
