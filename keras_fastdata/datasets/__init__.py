"""Datasets that are ready made, on top of what `FastPyDataset` offers."""
