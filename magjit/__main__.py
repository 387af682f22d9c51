"""``python -m magjit``."""

from magjit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
