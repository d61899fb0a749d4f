"""A tiny random Llama with a byte-level tokenizer, on disk like any other checkpoint."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE)


def save_tiny_llama(directory: Path, seed: int = 0, key_outlier: float = 1.0) -> Path:
    """Write a model with 2 layers, 2 KV heads of 32 channels: p = 128. `key_outlier` scales one channel of every K."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[3] *= key_outlier
    model.to(torch.bfloat16).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
