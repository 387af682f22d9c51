"""A file that fails while it is imported."""

import torch

raise RuntimeError("this program wants to be started otherwise")

TESTCASES = []
