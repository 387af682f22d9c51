"""`python -m paritybench_runner`."""

import sys

from paritybench_runner.cli import main

sys.exit(main())
