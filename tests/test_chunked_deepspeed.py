"""`chunked` under DeepSpeed, on two ranks: ZeRO 1 and 2 train as they do without chunks, and ZeRO 3 is refused.

DeepSpeed is built against the torch that is there (`DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed`) and
compiles a part of itself when it starts, so it is no requirement of the tests.
"""

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("deepspeed", reason="needs a DeepSpeed that is built against this torch")

TRAIN = """
import logging, os, sys
import torch
import torch.distributed as dist
from torch import nn
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param
import megabatch as mb

logging.disable(logging.CRITICAL)
stage, spelling = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
deepspeed.init_distributed("gloo", verbose=False)
rank = dist.get_rank()

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))

    def encode(self, x):
        return self.tower(x)

    def forward(self, x, chunk):
        return mb.chunked(self.tower, x, chunk_size=chunk) if chunk else self.tower(x)

def train(spelling):
    model = Encoder()
    zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config["zero_force_ds_cpu_optimizer"] = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(1)
    x = torch.randn(11, 6)[slice(0, 3) if rank == 0 else slice(3, 11)]  # other numbers of chunks
    for _ in range(3):
        if spelling == "method":
            features = mb.chunked(engine.module.encode, x, chunk_size=2, module=engine)
        else:
            features = engine(x, 2 if spelling == "forward" else 0)
        engine.backward(features.square().tanh().sum())
        engine.step()
    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}

try:
    plain, ours, start = train("plain"), train(spelling), dict(Encoder().named_parameters())
    for name, value in ours.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(value, start[name], rtol=1e-3, atol=1e-4), name
    print("same")
except Exception as error:
    print("refused" if str(error).startswith("chunked: ") else "failed", type(error).__name__, error)
sys.stdout.flush()
os._exit(0)  # DeepSpeed's threads outlive the group
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def answers(stage: int, spelling: str) -> list[str]:
    """The last line of each rank."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", TRAIN, str(stage), spelling],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    return [rank.communicate(timeout=900)[0].strip().splitlines()[-1] for rank in ranks]


@pytest.mark.parametrize("spelling", ["forward", "method"])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_trains_as_without_chunks(stage: int, spelling: str) -> None:
    assert answers(stage, spelling) == ["same", "same"]


@pytest.mark.parametrize("spelling", ["forward", "method"])
def test_partitioned_parameters_are_refused_by_name_before_the_first_backward(spelling: str) -> None:
    words = "refused ValueError chunked: encoder must not be partitioned by DeepSpeed's ZeRO stage 3"
    for answer in answers(3, spelling):
        assert answer.startswith(words)
