"""The training programs are started as files: their folder is what Python finds their neighbours in."""

from tests.support.train_folder import TRAIN
