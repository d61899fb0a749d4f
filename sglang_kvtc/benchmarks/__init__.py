"""Benchmark routines, which lie in `<repository>/benchmarks` in a checkout.

This file serves checkouts and editable installs. In a wheel `sglang_kvtc/benchmarks` holds the contents of that folder
itself, by the directory map in pyproject.toml, and needs no search path.
"""

from pathlib import Path

__path__.append(str(Path(__file__).parents[2] / "benchmarks"))
