"""Predictions against published measurements: `python -m benchmarks.published`.

A table has one row per training run that somebody measured and published. `table` reads it,
`adapter` turns a row into a model, a topology and a layout and says what it had to infer, the
planner prices the layout as `plan check` does, and `score` and `report` say how far that was from
the measurement. `fit` fits the constants of `planner/stacks` on a stated part of the rows.
"""
