"""The whole effect table."""

from ..twin import merged
from . import rows_objects, rows_outputs, rows_tensors, rows_world, rows_writes

PARTS = (rows_outputs, rows_writes, rows_objects, rows_tensors, rows_world)
ROWS = merged(*(part.ROWS for part in PARTS))
