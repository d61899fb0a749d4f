"""Gated KV eviction (Fast KVzip, arXiv 2601.17668): from the scores of KV pairs to the pairs that stay."""
