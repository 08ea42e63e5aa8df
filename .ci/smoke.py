"""Uses the installed package, and looks into its source distribution.

    PYTHON_OF_A_FRESH_ENVIRONMENT .ci/smoke.py dist/keras_fastdata-0.2.0.tar.gz

The package is that of the environment: this script's folder has no other.
"""

import importlib.metadata
import re
import sys
import tarfile

import keras
import numpy as np

import keras_fastdata


class Noise(keras_fastdata.FastPyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = self.rng.random((32, 8), "float32")
        return x, x.sum(axis=1)


def losses(**kwargs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Noise(seed=1, **kwargs) as noise:
        return model.fit(noise, epochs=2, verbose=0).history["loss"]


def sdist_lacks(path):
    with tarfile.open(path) as archive:
        found = {
            name.partition("/")[2].split("/")[0] for name in archive.getnames()
        }
    wanted = "CHANGELOG.md LICENSE README.md benchmarks docs examples tests"
    return [name for name in wanted.split() if name not in found]


def relative_links(text):
    """Returns the links and pictures that a package index could not follow."""
    found = re.findall(r"\]\(([^)\s]+)", text)
    found += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    return [link for link in found if not link.startswith("https://")]


def main(sdist):
    assert sys.prefix in keras_fastdata.__file__, keras_fastdata.__file__
    metadata = importlib.metadata.metadata("keras-fastdata")
    assert metadata["Version"] == keras_fastdata.__version__
    assert not relative_links(metadata.get_payload())
    installed = {
        str(path) for path in importlib.metadata.files("keras-fastdata")
    }
    assert "keras_fastdata/py.typed" in installed
    assert "keras_fastdata/health/report/page.html.jinja" in installed
    assert not sdist_lacks(sdist), sdist_lacks(sdist)
    inline = losses(workers=0)
    processes = losses(workers=2, use_multiprocessing=True)
    np.testing.assert_allclose(inline, processes, rtol=1e-5)
    print(f"installed from {sdist} and trained: the losses are {processes}")


if __name__ == "__main__":
    main(sys.argv[1])
