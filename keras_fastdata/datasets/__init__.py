"""Contains ready-made datasets that are based on `FastPyDataset`."""
