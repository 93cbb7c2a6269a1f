"""``python -m dsjax`` is the command line."""

from dsjax.cli import main

if __name__ == "__main__":
    main()
