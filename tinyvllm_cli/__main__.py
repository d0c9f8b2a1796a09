"""The program: `tinyvllm`, or `python -m tinyvllm_cli`."""

import signal
import sys


def run() -> None:
    """Entry point of the console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C ends it without a traceback even while
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # modules are loaded; commands have their own handlers
    from tinyvllm_cli.cli import main

    try:
        main()
    except OSError as error:  # of --help and --version: commands tell theirs themselves
        sys.exit(f"error: the output cannot be written: {error.strerror}")


if __name__ == "__main__":
    run()
