"""Sources over files of a format, for workers that do not import Keras."""

from __future__ import annotations


class Numbers:
    """The numbers that records hold."""

    def __init__(self, source):
        self.source = source
        self.part_lengths = source.part_lengths

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return int(self.source[index])

    def __getitems__(self, indices):
        return [*map(int, self.source.__getitems__(indices))]
