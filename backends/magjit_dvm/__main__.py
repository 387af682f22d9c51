"""``python -m magjit_dvm``."""

from magjit_dvm.cuda.ahead import main

if __name__ == "__main__":
    raise SystemExit(main())
