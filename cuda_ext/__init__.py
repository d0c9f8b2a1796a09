"""CUDA kernels of tinyvllm and what builds them. Importing this package builds nothing and loads nothing."""
