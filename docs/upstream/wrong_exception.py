"""The first exception is replaced by that of a later batch."""

import re
import sys
import time

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index >= 2:
            time.sleep(0.5)
            raise ValueError(f"batch {index} is broken")
        return np.zeros((1, 1))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
try:
    model.predict(Data(workers=2), verbose=0)
except Exception as error:
    raised = re.search(r"batch \d+ is broken", str(error))[0]
    print(f"The first exception said batch 2. Keras raised: {raised}.")
    sys.exit("Mended: it was the first." if "2" in raised else 0)
