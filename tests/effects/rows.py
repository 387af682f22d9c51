"""The whole effect table."""

from ..twin import merged
from . import rows_hidden, rows_objects, rows_outputs, rows_tensors, rows_world, rows_writes

PARTS = (rows_outputs, rows_writes, rows_objects, rows_tensors, rows_world, rows_hidden)
ROWS = merged(*(part.ROWS for part in PARTS))
