"""Tensor work here is tiny: more than one thread would only wait for the others."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
