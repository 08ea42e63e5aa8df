"""One walk through a dataset, as whoever takes its batches sees it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

from keras_fastdata.engine import build, resume
from keras_fastdata.engine.loader import END, Loader
from keras_fastdata.engine.walk import Walk
from keras_fastdata.health.recorder import Span
from keras_fastdata.workers import failures


def open_pass(loader: Loader, dataset: build.Dataset, shuffle: bool) -> Pass:
    """A new pass; its epoch begins with its first batch."""
    if loader.settings.shuffle is not None:
        shuffle = loader.settings.shuffle
    return Pass(loader, dataset, Walk(shuffle))


class Pass(Iterator[Any]):
    """One walk through a dataset: an epoch, as an iterator of batches.

    Attributes:
        span: How the latest batch came about, if it was timed.
        settled_s: How long the latest `fetch` waited for the workers to rest.
    """

    def __init__(
        self, loader: Loader, dataset: build.Dataset, walk: Walk
    ) -> None:
        self.span: Span | None = None
        self.settled_s = 0.0
        self._loader = loader
        # The dataset must not be collected while it is being walked through.
        self._dataset = dataset
        self._walk = walk
        self._taken = 0  # of the skipped batches
        self._consumer = 0  # the thread that asked for the latest batch
        loader.enroll(self, walk)

    def __next__(self) -> Any:
        try:
            return self.fetch()
        except StopIteration:
            raise
        except Exception as error:
            failures.shorten(error)
            raise

    def fetch(self, *, quietly: bool = False) -> Any:
        """The next batch; or `StopIteration`.

        Args:
            quietly: Whether the workers shall rest until another batch is
                asked for, so that they slow nothing down meanwhile.
        """
        if self._consumer != threading.get_ident():
            self._consumer = threading.get_ident()
            build.consume(self._dataset)
        try:
            batch = self._loader.deliver(self._walk, self._dataset, quietly)
        except StopIteration as error:
            raise _not_the_end(error) from error
        if batch is END:
            raise StopIteration
        self.span, self.settled_s = self._walk.span, self._walk.settled_s
        return batch

    def lead_on(self, leads_on: bool) -> None:
        """Says whether another epoch follows, to be begun ahead of its time.

        Its first batches are asked for when there is room behind the last of
        this one. Call `open_following` to have them.
        """
        self._walk.leads_on = leads_on

    def open_following(self) -> Pass:
        """A pass through the next epoch, in the same kind of order."""
        walk = self._walk
        following = walk.following
        if following is None:
            following = Walk(walk.shuffle)
            following.may_lead = walk.may_lead
        opened = Pass(self._loader, self._dataset, following)
        # Only now: an interrupt must not leave it to nobody.
        walk.following = None
        return opened

    def time_batches(self, interval_s: float | None) -> None:
        """Has the batches that are asked for from now on come with a span.

        Args:
            interval_s: One of them in this time, and all that take as long;
                0 for all of them. `None`: without.
        """
        self._walk.interval_s = interval_s

    @property
    def is_shortened(self) -> bool:
        """Whether any batch was left out, or is from an earlier run."""
        return bool(self._walk.skipped) or self._walk.start > 0

    def state(self, behind: int) -> resume.State:
        """Where the dataset stood before the latest `behind` batches."""
        return self._loader.state(self._dataset, self._walk, behind)

    @property
    def epoch(self) -> int:
        """Its number; or what it will be, if no other begins before."""
        walk = self._walk
        if walk.begun and walk.epoch is not None:
            return walk.epoch
        return self._loader.epoch

    @property
    def index(self) -> int | None:
        """Index of the batch delivered last; `None` before the first."""
        return self._walk.latest

    @property
    def peeked(self) -> list[int]:
        """Indices of the batches that `peek` has built, in its order."""
        return list(self._walk.peeked)

    @property
    def is_empty(self) -> bool:
        """Whether no batch has been delivered."""
        return not self._walk.delivered

    @property
    def has_met_its_end(self) -> bool:
        """Whether it was the dataset that said where it ends."""
        return self._walk.met_its_end

    @property
    def is_read_only(self) -> bool:
        """Whether the latest batch is one that others may look at too."""
        return self._walk.is_from_cache or self._loader.lends_read_only

    def take_skipped(self) -> dict[int, str]:
        """Batches left out since the last call: index and traceback."""
        skipped = self._walk.skipped
        new = dict(itertools.islice(skipped.items(), self._taken, None))
        self._taken += len(new)
        return new

    def peek(self, count: int) -> list[Any]:
        """Builds the batches of lowest index ahead of their turn.

        When their turn comes, they are delivered without being built again.

        Returns:
            `count` batches; fewer if the dataset has no more that are good.
        """
        try:
            return self._loader.peek(self._walk, self._dataset, count)
        except StopIteration as error:
            raise _not_the_end(error) from error

    def remember_first(self) -> None:
        """Keeps the first two until the third, so that `rewind` has them."""
        self._walk.remembers = True

    def rewind(self) -> None:
        """Starts over, in the same epoch and order, as if never begun."""
        self._loader.rewind(self._walk)


def _not_the_end(error: StopIteration) -> RuntimeError:
    """What a StopIteration of the user's becomes, as in a generator.

    It would end the epoch early, and nobody would notice.
    """
    return RuntimeError(
        f"The dataset raised StopIteration{error.args}; its epoch is not over."
    )
