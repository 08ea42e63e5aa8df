"""What `auto_config` has, in a module that is imported late."""

from auto_config import Scaler

scale = Scaler(1).apply
