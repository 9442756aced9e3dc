"""Commands around training: `hf-dist`, the benchmark, the check of a layout."""
