"""Run the command line as `python -m clearhead`."""

import signal


def main() -> None:
    """Import the command line, while Ctrl-C ends the process without a traceback, and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clearhead.cli import main as run

    run(ends_process=True)


if __name__ == "__main__":
    main()
