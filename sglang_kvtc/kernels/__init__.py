"""Device code, which lies in `<repository>/kernels` in a checkout and right here in a wheel.

The top-level folder has no `__init__.py`, so that it never stands in for the `kernels` package SGLang imports; this
one adds it to the search path. The package list and directory map in pyproject.toml do the same for a wheel.
"""

from pathlib import Path

_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parents[1] / "kernels"
if not (_HERE / "triton_ops").is_dir() and (_CHECKOUT / "triton_ops").is_dir():
    __path__.append(str(_CHECKOUT))
