"""Settings shared by all tests."""

import os

import hypothesis

# As the Makefile does: OpenMP threads that spin at barriers starve whatever shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Models come from installed packages: a test that tries to reach a model hub fails at once instead of hanging.
os.environ["HF_HUB_OFFLINE"] = "1"

# Examples are drawn the same way in every run, and a slow shared machine is not a failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
