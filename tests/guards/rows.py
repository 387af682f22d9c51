"""The whole guard table."""

from ..twin import merged
from . import (
    rows_caches,
    rows_calls,
    rows_classes,
    rows_hidden_classes,
    rows_hidden_containers,
    rows_hidden_functions,
    rows_hidden_objects,
    rows_modules,
    rows_needed,
    rows_python,
    rows_torch,
    rows_values,
)

PARTS = (
    rows_values,
    rows_python,
    rows_classes,
    rows_modules,
    rows_torch,
    rows_calls,
    rows_hidden_classes,
    rows_hidden_functions,
    rows_hidden_containers,
    rows_hidden_objects,
    rows_needed,
    rows_caches,
)
ROWS = merged(*(part.ROWS for part in PARTS))
