"""Workers start before `on_epoch_begin`, and do not see what it changes."""

import sys
import threading

import keras
import numpy as np

worker_has_built = threading.Event()


class Data(keras.utils.PyDataset):
    epoch = 0

    def __len__(self):
        return 1

    def on_epoch_begin(self):
        worker_has_built.wait(2)  # such as reading a list of files
        self.epoch += 1

    def __getitem__(self, index):
        if threading.current_thread() is not threading.main_thread():
            worker_has_built.set()
        return np.full((1, 1), self.epoch)


model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
seen = model.predict(Data(workers=2), verbose=0)[0, 0]
print(f"`on_epoch_begin` set 1; the batch was built with {seen:g}.")
sys.exit(0 if seen == 0 else "Mended: workers start after `on_epoch_begin`.")
