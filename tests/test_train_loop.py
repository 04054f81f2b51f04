"""`megabatch train` for real, in small: one and the same run however it is cut, and what it keeps."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from megabatch import cli
from megabatch.train import checkpoint, loop
from megabatch.train.data.loader import Batch

from .ranks import new_process
from .training import evaluations, losses, steps, train, write_pairs, write_shapes

QUICK = ["--global-batch-size", "32", "--steps", "6", "--lr", "1e-3", "--warmup", "2", "--workers", "0"]
QUICK += ["--chunk-size", "32"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return str(write_shapes(tmp_path_factory.mktemp("shapes")))


@pytest.fixture(scope="module")
def plain(shapes, tmp_path_factory):
    """A run that others are held against."""
    return train(tmp_path_factory.mktemp("plain"), "--train-data", shapes, *QUICK)


def train_on_ranks(rank, group, words):
    """On ranks that are there already."""
    return cli.main(words)


# ---- one and the same run


@pytest.mark.parametrize("flags", [["--chunk-size", "7"], ["--workers", "2"], ["--chunk-size", "1"]], ids=" ".join)
def test_chunks_and_workers_do_not_change_the_run(shapes, plain, tmp_path, flags):
    run = train(tmp_path, "--train-data", shapes, *QUICK, *flags)
    exact = flags[0] == "--workers"
    assert losses(run) == pytest.approx(losses(plain), abs=0 if exact else 1e-5, rel=0)


def test_the_dense_loss_gives_the_same_run(shapes, plain, tmp_path):
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--dense-loss")
    assert losses(run) == pytest.approx(losses(plain), abs=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_do_not_change_the_run(shapes, plain, tmp_path, pool, ranks):
    words = ["train", "--train-data", shapes, "--logs", str(tmp_path), "--name", "run", *QUICK]
    assert pool.run(ranks, train_on_ranks, words) == [0] * ranks
    assert losses(tmp_path / "run") == pytest.approx(losses(plain), abs=1e-5)
    assert [line["train/samples"] for line in steps(tmp_path / "run")] == [32 * step for step in range(1, 7)]
