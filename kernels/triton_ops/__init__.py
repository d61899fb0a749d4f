"""Triton kernels. Every file with operations has the name of its oracle, which lies in a lower layer."""
