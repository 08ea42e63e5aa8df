"""Workers that a test answers for."""

from __future__ import annotations

from keras_fastdata.workers.base import LocalResult, WorkerPool


class Result(LocalResult):
    """A result that knows whether it was discarded."""

    is_discarded = False

    def discard(self):
        self.is_discarded = True
        super().discard()


class FakePool(WorkerPool):
    """A pool of workers that build what the test says, when it says so.

    Attributes:
        out: The requests that are out, by id.
        capacity: How many may be out.
        results: Every result that was made.
        is_closed: Whether the workers were ended.
        slow_requests: The ids of the requests whose builds are slow.
    """

    slow_requests = frozenset()

    def __init__(self, capacity=100):
        self.capacity = capacity
        self.out = {}
        self.results = []
        self.is_closed = False
        self._completed = []

    def build(self, request_id, nbytes=0):
        """Answers a request."""
        request = self.out.pop(request_id)
        result = Result(request_id, 0, batch=request.index, nbytes=nbytes)
        self.results.append(result)
        self._completed.append(result)

    def submit(self, request):
        if len(self.out) >= self.capacity:
            return False
        self.out[request.request_id] = request
        return True

    def collect(self):
        completed, self._completed = self._completed, []
        return completed

    def cancel(self, request_ids):
        for request_id in list(request_ids):
            self.out.pop(request_id, None)
            for result in self._completed:
                if result.request_id == request_id:
                    result.discard()
            self._completed = [
                r for r in self._completed if r.request_id != request_id
            ]

    def expect(self, ahead):
        pass

    def wait(self, timeout_s):
        pass

    def close(self):
        self.is_closed = True
