"""Run the command line as `python -m clearhead`."""

from clearhead.cli import main

if __name__ == "__main__":
    main()
