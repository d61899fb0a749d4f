"""The engine-agnostic compressed tier: what is stored, when it is coded, and how it comes back."""
