"""One of several processes that train together, on this machine.

    python shard_runs.py HOW RANK COUNT PORT

prints, as JSON, the samples this process has trained on in each epoch, and the
loss of each epoch.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from keras_fastdata import FastPyDataset

ROWS = 6  # of a batch
BATCHES = 8
EPOCHS = 3


class Numbered(FastPyDataset):
    """Samples whose number is in them."""

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        number = np.arange(index * ROWS, (index + 1) * ROWS)
        x = np.stack([number / 50, number % 3 / 3], axis=1).astype("float32")
        return x, x.sum(axis=1, keepdims=True) * 2


class Steps(Numbered):
    """The batches that two processes have in a step, as one batch."""

    def __len__(self):
        return BATCHES // 2

    def __getitem__(self, index):
        pair = [super(Steps, self).__getitem__(2 * index + n) for n in (0, 1)]
        return tuple(np.concatenate(parts) for parts in zip(*pair, strict=True))


class Seen:
    """Notes samples as they are handed over for training."""

    def __init__(self):
        self.epochs = []
        self.open = False

    def note(self, x):
        number = np.round(np.asarray(x)[:, 0] * 50).astype(int)
        self.epochs[-1] += number.tolist()


def fit(dataset, seen):
    import keras

    from keras_fastdata.keras_bridge import FastPyDatasetAdapter

    standardize = FastPyDatasetAdapter._standardize_batch

    class Notes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.epochs.append([])
            seen.open = True

        def on_train_end(self, logs=None):
            seen.open = False

    def noting(adapter, batch):
        if seen.open:
            seen.note(batch[0])
        return standardize(adapter, batch)

    model = model_of()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    FastPyDatasetAdapter._standardize_batch = noting
    try:
        with dataset:
            history = model.fit(
                dataset,
                epochs=EPOCHS,
                verbose=0,
                shuffle=False,
                callbacks=[Notes()],
            )
    finally:
        FastPyDatasetAdapter._standardize_batch = standardize
    return history.history["loss"]


def model_of():
    import keras

    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )


def jax_processes(rank, count, port, seen):
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    import keras

    keras.distribution.set_distribution(
        keras.distribution.DataParallel(auto_shard_dataset=False)
    )
    try:
        return fit(Numbered(workers=2), seen)
    finally:
        jax.distributed.shutdown()


def jax_devices(rank, count, port, seen):
    import keras

    assert len(keras.distribution.list_devices()) == 4
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return fit(Steps(workers=2), seen)


def tensorflow_mirrored(rank, count, port, seen):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return fit(Steps(workers=2), seen)


def tensorflow_workers(rank, count, port, seen):
    """A loop of one's own: Keras's `fit` does not know this strategy."""
    hosts = [f"127.0.0.1:{port + n}" for n in range(count)]
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": hosts},
            "task": {"type": "worker", "index": rank},
        }
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    losses = []
    with strategy.scope(), Numbered(workers=2) as dataset:
        weights = tf.Variable([[1.0], [1.0]])
        bias = tf.Variable([0.0])

        @tf.function(reduce_retracing=True)
        def step(x, y):
            def replica(x, y):
                with tf.GradientTape() as tape:
                    error = tf.matmul(x, weights) + bias - y
                    loss = tf.reduce_mean(error**2) / count
                gradients = tape.gradient(loss, [weights, bias])
                context = tf.distribute.get_replica_context()
                gradients = context.all_reduce("sum", gradients)
                for variable, gradient in zip(
                    (weights, bias), gradients, strict=True
                ):
                    variable.assign_sub(0.05 * gradient)
                return context.all_reduce("sum", loss)

            return strategy.run(replica, (x, y))

        for _ in range(EPOCHS):
            seen.epochs.append([])
            total = []
            for x, y in dataset:
                seen.note(x)
                total.append(float(step(tf.constant(x), tf.constant(y))))
            losses.append(sum(total) / len(total))
    return losses


# PyTorch 2.13 may wait for ever when the last reference to a process group is
# dropped: once in some twenty runs.
_KEPT = []


def torch_processes(rank, count, port, seen):
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count
    )
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    _KEPT.append(parallel)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.05)
    losses = []
    with Numbered(workers=2) as dataset:
        for _ in range(EPOCHS):
            seen.epochs.append([])
            total = []
            for x, y in dataset:
                seen.note(x)
                optimizer.zero_grad()
                error = parallel(torch.from_numpy(x)) - torch.from_numpy(y)
                loss = (error**2).mean()
                loss.backward()
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                total.append(float(mean) / count)
            losses.append(sum(total) / len(total))
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    how, rank, count, port = sys.argv[1:]
    seen = Seen()
    losses = globals()[how](int(rank), int(count), int(port), seen)
    print(json.dumps({"samples": seen.epochs, "losses": losses}), flush=True)
    if _KEPT:
        os._exit(0)
