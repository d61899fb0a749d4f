"""The Triton kernels compile for GPUs, which the interpreter does not tell. No GPU is needed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Shared memory of a block on the GPUs that have least of it, those of compute capability 8.6, 8.9 and 12.0.
SHARED_BYTES = 101376

COMPILE = """
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sglang_kvtc.kernels.triton_ops import launch, paged_attention

# As in a launch with contiguous tensors: strides and pointers are multiples of 16, the last strides are 1.
ALIGNED = [["tt.divisibility", 16]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compiled(name, rows, splits, capability, head_dim, v_head_dim, group, dtype):
    types = {
        **dict.fromkeys(("queries", "out", "k_cells", "v_cells"), "*" + dtype),
        **dict.fromkeys(("partial", "partial_log"), "*fp32"),
        **dict.fromkeys(("arena", "lengths", "q_indptr"), "*i32"),
        **dict.fromkeys(("k_strides", "v_strides"), ("i32", "constexpr")),
        **dict.fromkeys(("q_strides", "out_strides"), ("i32", "i32", "constexpr")),
        "starts": "*i64", "scaling": "fp32", "num_kv_heads": "i32", "num_blocks": "i32",
    }
    kernel = getattr(paged_attention, name)
    queries = torch.empty(1, group, head_dim, dtype=DTYPES[dtype])
    shape = launch.kernel_constants(queries, torch.empty(1, v_head_dim), rows or launch.block_rows(queries, group))
    constants = {**shape, "group": group, "splits": splits, "splits_block": splits}
    signature, constexprs, attributes = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[place,] = "constexpr", constants[argument]
            continue
        signature[argument] = kind = types[argument]
        if isinstance(kind, tuple):
            constexprs[place, len(kind) - 1] = 1
            attributes |= {(place, of): ALIGNED for of in range(len(kind) - 1)}
        elif kind.startswith("*"):
            attributes[place,] = ALIGNED
    return compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4},
    )


for case in sys.argv[1:]:
    *sizes, dtype = case.split()
    for name, rows, splits in (("_decode", 16, 1), ("_decode", 16, 8), ("_combine", 16, 8), ("_extend", None, 1)):
        kernel = compiled(name, rows, splits, *map(int, sizes), dtype)
        products = any(product in kernel.asm["ptx"] for product in ("mma.sync", "wgmma", "tcgen05.mma"))
        print(case, name, kernel.metadata.shared, products, sep=",")
"""


# Compute capability, head size of keys and values, query heads per KV head, dtype.
CASES = (
    "80 128 128 4 bf16",
    "89 256 256 8 fp32",
    "90 64 80 3 fp16",
    "90 256 256 1 bf16",
    "100 128 128 8 bf16",
)
# Compute capability and kernel of the codec.
CODEC_CASES = (
    *(f"90 {name}" for name in ("encode-1", "encode-256", "decode", "measure", "choose", "encode", "decode-fp16")),
    "80 encode-16",
    "100 encode-16",
)

COMPILE_CODEC = """
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sglang_kvtc.kernels.triton_ops import pack, quantize, uniform

TYPES = {
    **dict.fromkeys(("coefficients", "squares", "reaches", "inverse_deviations", "inverse_levels", "steps"), "*fp32"),
    **dict.fromkeys(("widths", "groups", "first_rows", "members", "refused"), "*i32"),
    **dict.fromkeys(("starts", "upper_starts", "lower_starts"), "*i32"),
    **dict.fromkeys(("packed", "codes"), "*u8"), "params": "*fp16",
}


def compiled(kernel, capability, constants, is_transposed=False, out="bf16"):
    signature, constexprs = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[place,] = "constexpr", constants[argument]
        elif argument == "strides":
            signature[argument] = ("constexpr", "i32") if is_transposed else ("i32", "constexpr")
            constexprs[place, 0 if is_transposed else 1] = 1
        else:
            signature[argument] = {**TYPES, "out": "*" + out}.get(argument, "i32")
    # The options with which the operations launch.
    return compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, **pack.EXACT_OPTIONS},
    )


encode = {"rows": uniform.ENCODED_ROWS, "tile_words": uniform.TILE_WORDS}
decode = {**encode, "rows": uniform.DECODED_ROWS}
measure = {"split_rows": uniform.SPLIT_ROWS, "rows": uniform.SUM_ROWS, "tokens": uniform.SUM_TOKENS}
KERNELS = {
    **{
        f"encode-{size}": (quantize._quantize_and_pack, {"size": size, "rows": rows, "tile_words": words})
        for size in (1, 16, 256)
        for rows, words in [quantize.tile_of(size)]
    },
    "decode": (
        quantize._unpack_and_dequantize, {"rows": quantize.DECODED_ROWS, "tile_words": quantize.DECODED_WORDS}, True
    ),
    "measure": (uniform._measure, measure),
    "choose": (uniform._choose_steps, {"tokens": uniform.STEP_TOKENS}),
    "encode": (uniform._quantize_and_pack, encode),
    "decode-fp16": (uniform._unpack_and_dequantize, decode, False, "fp16"),
}
INEXACT = ("fma.rn.f32", "div.full", "div.approx", "sqrt.approx", ".ftz")

for case in sys.argv[1:]:
    capability, name = case.split()
    kernel, *arguments = KERNELS[name]
    code = compiled(kernel, int(capability), *arguments)
    ptx = code.asm["ptx"]
    found = "+".join(instruction for instruction in INEXACT if instruction in ptx)
    print(case, code.metadata.shared, "div.rn.f32" in ptx, found, sep=",")
"""


def compile_for_gpus(script: str, cases: Sequence[str], cache: Path) -> list[list[str]]:
    """The lines that the script prints about its cases, split at commas."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # A process of its own, whose Triton does not interpret.
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *cases],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [line.split(",") for line in result.stdout.splitlines()]


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    compiled = compile_for_gpus(COMPILE, CASES, tmp_path)
    names = ("_decode", "_decode", "_combine", "_extend")
    assert [(case, name) for case, name, *_ in compiled] == [(case, name) for case in CASES for name in names]
    assert all(int(shared) <= SHARED_BYTES for _, _, shared, _ in compiled)
    # 16 bits are multiplied by tensor cores, 32 bits without being rounded to fewer.
    for case, name, _, uses_tensor_cores in compiled:
        assert name == "_combine" or uses_tensor_cores == str(not case.endswith("fp32"))


def test_kernels_of_the_codec_compile_to_exact_arithmetic(tmp_path: Path) -> None:
    compiled = compile_for_gpus(COMPILE_CODEC, CODEC_CASES, tmp_path)
    assert [case for case, *_ in compiled] == list(CODEC_CASES)
    for case, shared, divides, inexact in compiled:
        assert int(shared) <= SHARED_BYTES
        # Nothing is fused, flushed to zero or divided approximately, so a GPU computes what the interpreter does.
        assert (case, inexact) == (case, "")
        assert (case, divides) == (case, str("encode" in case or "choose" in case))
