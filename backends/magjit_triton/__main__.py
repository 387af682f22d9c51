"""``python -m magjit_triton``."""

from magjit_triton.macro.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
