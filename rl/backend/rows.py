"""Rows of a large variable, read and written without a copy of all the others."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def read_rows(variable: Any, places: Any) -> Any:
        """Returns the rows at integer places, `(*places, ...)`."""
        return tf.gather(variable.value, places)  # of the resource; Keras' own function would read all of it first

    def write_rows(variable: Any, places: Any, rows: Any) -> None:
        """Writes rows at integer places, `(M,)`; where a place occurs twice any of its rows may stay."""
        variable.value.scatter_update(tf.IndexedSlices(rows, places))

else:

    def read_rows(variable: Any, places: Any) -> Any:
        """Returns the rows at integer places, `(*places, ...)`."""
        return ops.take(variable, places, axis=0)

    def write_rows(variable: Any, places: Any, rows: Any) -> None:
        """Writes rows at integer places, `(M,)`; where a place occurs twice any of its rows may stay."""
        # XLA does it in place, since the variable's old value is given away.
        variable.assign(ops.scatter_update(variable, places[:, None], rows))
