"""One word, one meaning."""

from __future__ import annotations

import ast
import collections

from package_source import trees

# Names that the package had, and what took their places.
_GONE = {
    "Walk": "Epoch",
    "walk": "epoch",
    "open_pass": "iterate",
    "enroll": "register",
    "retire": "finish",
    "let_go": "discard_prefetched",
    "leads_on": "prefetches_next",
    "may_lead": "may_prefetch_next",
    "lead_on": "prefetch_next",
    "following": "next_epoch",
    "trail": "recent_positions",
    "behind": "lag",
    "Tickets": "Prefetcher",
    "refill": "fill",
    "Ticket": "BatchRequest",
    "ticket": "request",
    "tickets": "requests",
    "serial": "request_id",
    "serials": "request_ids",
    "wire": "task_id",
    "Route": "Pending",
    "Arrival": "Completed",
    "Done": "BatchResult",
    "Built": "LocalResult",
    "Delivery": "SlotResult",
    "take_up": "apply_settings",
    "take_in": "drain_results",
    "take_back": "requeue",
    "hire": "create_pool",
    "hiring": "pool_factory",
    "employ": "start_pool",
    "dismissed_with": "finalize_with",
    "Leave": "ShutdownFlag",
    "Workers": "WorkerPool",
    "Staff": "PoolStats",
    "staff": "pool_stats",
    "Loss": "WorkerLoss",
    "Decision": "TuningDecision",
    "toll": "restart_policy",
    "Toll": "RestartPolicy",
    "strike": "note_crash",
    "strikes": "crashes",
    "deaths": "exit_messages",
    "Death": "WorkerExit",
    "bury": "on_exit",
    "fallen": "last_dead_forkserver",
    "ledger": "in_flight",
    "Ledger": "InFlight",
    "Sent": "Task",
    "limbo": "quarantine",
    "backlog": "queued",
    "noted": "heartbeat",
    "clocked": "started_s",
    "nursery": "forkserver",
    "Nursery": "Forkserver",
    "relay": "log_forwarding",
    "Habits": "LoggingConfig",
    "habits": "logging_config",
    "take_apart": "dump_exception",
    "put_together": "load_exception",
    "answer_into": "enable",
    "Watch": "Watchdog",
    "Work": "Activity",
    "Overdue": "Expired",
    "overdue": "expired",
    "Uninterrupted": "DeferredSignals",
    "payload": "shared_state",
    "Payload": "SharedState",
    "Lease": "SlotRef",
    "lend": "lease",
    "give_back": "drop_pages",
    "seal": "copy_retained",
    "Shipment": "RemoteDataset",
    "InStore": "StoreUsage",
    "desk": "assigned",
    "relieve": "start_backups",
    "Auto": "AutoTuner",
    "barred": "excluded",
    "Barred": "ExcludedError",
    "is_settled": "has_converged",
    "SharedDraw": "GlobalRngUsedError",
    "GlobalsWatch": "GlobalRngMonitor",
    "drew": "on_global_rng",
    "preserving": "global_rng",
    "mersenne": "mt19937",
    "settle": "complete",
    "settled_s": "quiesce_s",
    "quietly": "pause_after",
    "rested_s": "quiesced_s",
    "aside_s": "excluded_s",
    "announce": "stop_early",
    "Unraised": "DeferredError",
    "Taker": "Consumer",
    "book": "record_batch",
    "hear_from": "attach_source",
    "is_heard_by": "should_record",
    "Meter": "EpochMonitor",
    "Stretch": "EpochTiming",
    "Subject": "MonitoredDataset",
    "Tally": "BatchStats",
    "tally": "batch_stats",
    "guest": "nested",
    "come_back": "resume_fit",
    "fragment": "notebook",
    "ordering": "sampling",
    "Form": "ImageSpec",
}
_OF_OTHERS = {
    ("datasets/directories.py", "walk"),  # `os.walk`
    ("memory/keras_layers.py", "Loss"),  # Keras's
}


def _identifiers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")


def test_names_that_were_given_up_do_not_return():
    found = {
        f"{file}: {name}; say {_GONE[name.strip('_')]}"
        for file, tree in trees().items()
        for name in _identifiers(tree)
        if name.strip("_") in _GONE
        and (file, name.strip("_")) not in _OF_OTHERS
    }
    assert found == set()


def test_no_file_has_a_name_that_was_given_up():
    parts = {part for file in trees() for part in file[:-3].split("/")}
    assert parts & set(_GONE) == set()


def _classes(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_no_two_modules_have_a_class_of_one_name():
    files = collections.defaultdict(set)
    for file, tree in trees().items():
        for node in _classes(tree):
            files[node.name].add(file)
    assert {n: f for n, f in files.items() if len(f) > 1} == {}


# Functions of one name mean one thing; so they are in these files alone.
_ONE_MEANING = {
    "begin_epoch": {"keras_bridge/fit_progress.py"},
    "collect": {
        "workers/base.py",
        "workers/inline.py",
        "workers/ray/pool.py",
        "workers/supervisor.py",
        "workers/thread.py",
    },
    "detach": {"metrics/recorder.py"},
    "give_up": {"health/report/trace.py"},
    "release": {"building/global_rng.py"},  # a lock
    "rewind": {
        "engine/batch_iterator.py",
        "engine/epoch.py",
        "engine/loader.py",
    },
}


def test_a_name_of_one_meaning_is_not_used_for_another():
    files = collections.defaultdict(set)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                files[node.name.strip("_")].add(file)
    assert {name: files[name] for name in _ONE_MEANING} == _ONE_MEANING
