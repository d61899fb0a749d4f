"""Offline calibration: run a model over text, fit one PCA basis per side, allocate bits for every wanted ratio."""
