"""The program: `tinyvllm`, or `python -m tinyvllm_cli`."""

import sys

from tinyvllm_cli.cli import main


def run() -> None:
    """Entry point of the console script."""
    try:
        main()
    except OSError as error:  # of --help and --version: commands tell theirs themselves
        sys.exit(f"error: the output cannot be written: {error.strerror}")


if __name__ == "__main__":
    run()
