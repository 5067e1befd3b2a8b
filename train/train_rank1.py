"""Runs mnist_mlp.py as rank 1, as in the published pair of files: this file is for the second machine."""

import mnist_mlp

if __name__ == "__main__":
    mnist_mlp.main(rank=1)
