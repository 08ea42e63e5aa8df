"""Ready-made datasets, built on `FastPyDataset`."""
