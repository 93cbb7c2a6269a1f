"""``python -m dsjax`` is the command line."""

from dsjax.cli import run

if __name__ == "__main__":
    run()
