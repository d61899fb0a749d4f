"""Triton kernels. Every file has the name of its oracle in `sglang_kvtc.codec`."""
