"""One module per routine; `sglang_kvtc.benchmarks.registry` says what each offers."""
