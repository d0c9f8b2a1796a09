"""`python -m tinyvllm_cli`."""

from tinyvllm_cli.cli import main

main()
