"""The only package that imports SGLang: entry point, flags, checks, and the radix cache over the tier."""
