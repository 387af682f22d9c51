"""The whole feature table."""

from ..twin import merged
from . import rows_arrays, rows_classes, rows_language, rows_library, rows_modules, rows_torch

PARTS = (rows_language, rows_classes, rows_library, rows_modules, rows_torch, rows_arrays)
ROWS = merged(*(part.ROWS for part in PARTS))
