"""Fixtures of the distillation tests."""

from pathlib import Path

import pytest
from calibrate.tiny_llama import byte_tokenizer, save_tiny_llama
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()
