"""Offline: importance targets from a teacher, and gates trained on them (Fast KVzip section 3.3)."""
