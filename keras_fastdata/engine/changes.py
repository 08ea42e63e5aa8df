"""What has changed of a dataset since its workers got it."""

from __future__ import annotations


class Changes:
    """What has changed of a dataset.

    Attributes:
        are_new: Whether the workers have the dataset as it was before.
        built: The attributes that builds have set.
    """

    def __init__(self) -> None:
        self.are_new = False
        self.built: set[str] = set()

    def mark(self) -> None:
        """Notes that the dataset is in another state."""
        self.are_new = True

    def mark_sent(self) -> None:
        """Notes that the workers get the dataset as it is."""
        self.are_new = False

    def note_assigned(self, name: str, by_build: bool) -> None:
        """Notes that an attribute was assigned or deleted."""
        if by_build:
            self.built.add(name)
        else:
            self.built.discard(name)
            self.mark()
