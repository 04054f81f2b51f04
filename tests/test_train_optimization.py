"""Parameter groups, schedule, precision."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from megabatch.train.config import Optimization
from megabatch.train.optimization import autocast, learning_rate, make_optimizer, make_scaler

from .shims import import_torchvision


def test_parameters_of_one_dimension_or_none_do_not_decay():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.logit_scale = nn.Parameter(torch.tensor(1.0))
    model[1].weight.requires_grad_(False)
    plain, decaying = make_optimizer(model.named_parameters(), Optimization(wd=0.3)).param_groups
    assert [tuple(p.shape) for p in plain["params"]] == [(), (4,), (4,)]
    assert [tuple(p.shape) for p in decaying["params"]] == [(4, 4)]
    assert (plain["weight_decay"], decaying["weight_decay"]) == (0.0, 0.3)


def test_the_optimizer_is_the_one_that_was_asked_for():
    options = Optimization(lr=0.1, beta1=0.5, beta2=0.6, eps=0.7)
    optimizer = make_optimizer(nn.Linear(2, 2).named_parameters(), options)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [optimizer.defaults[name] for name in ("lr", "betas", "eps")] == [0.1, (0.5, 0.6), 0.7]


def test_the_learning_rate_rises_in_a_line_and_falls_in_half_a_cosine():
    options = Optimization(lr=2.0, warmup=4)
    rates = [learning_rate(step, options, 12) for step in range(12)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx(1.0)
    assert rates[4:] == [pytest.approx(1 + math.cos(math.pi * step / 8)) for step in range(8)]


def test_a_constant_schedule_stays_up():
    options = Optimization(lr=2.0, warmup=2, lr_scheduler="const")
    assert [learning_rate(step, options, 5) for step in range(5)] == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_a_cooldown_falls_as_open_clips_does():
    import_torchvision()
    from open_clip_train.scheduler import const_lr_cooldown

    options = Optimization(lr=2.0, warmup=3, lr_scheduler="const-cooldown", epochs_cooldown=2)
    options = replace(options, lr_cooldown_end=0.5, lr_cooldown_power=2.0)
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]}]
    theirs = const_lr_cooldown(torch.optim.SGD(parameters, lr=2.0), 2.0, 3, 20, 8, 2.0, 0.5)
    for step in range(20):
        assert learning_rate(step, options, 20, steps_per_epoch=4) == pytest.approx(theirs(step), abs=1e-12)


def test_warm_up_is_a_tenth_of_the_steps_unless_given():
    assert [learning_rate(step, Optimization(lr=1.0), 30) for step in range(3)] == [1 / 3, 2 / 3, 1.0]
    assert learning_rate(0, Optimization(lr=1.0), 10**6) == 1e-4
    assert learning_rate(0, Optimization(lr=1.0, warmup=0), 10) == 1.0


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp", torch.float16)]
)
def test_precision_is_that_of_products(precision, dtype):
    device = torch.device("cpu")
    with autocast(device, precision):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    assert make_scaler(device, precision).is_enabled() == (precision == "amp")
