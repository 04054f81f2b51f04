"""The first lines of a run's log: what is trained, and what may not be meant."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from .optimization import warmup_steps

if TYPE_CHECKING:
    from .loop import Trainer


def introduce(trainer: "Trainer") -> None:
    report, options = trainer.report, trainer.config.optimization
    count = sum(parameter.numel() for parameter in trainer.parameters)
    report.say(
        f"{len(trainer.source)} samples, {options.global_batch_size} a step, {trainer.steps_per_epoch} steps an epoch, "
        f"{trainer.total_steps} steps; ranks: {trainer.world.size} ({trainer.world.device.type}); parameters to train: "
        f"{count / 1e6:.1f}M"
    )
    if options.global_batch_size > len(trainer.source):
        report.warn(
            f"--global-batch-size {options.global_batch_size} is more than there are samples: they come "
            f"{options.global_batch_size / len(trainer.source):.1f} times in a step, and an epoch is a step"
        )
    if trainer.running_statistics and (trainer.world.size > 1 or options.chunk_size < options.global_batch_size):
        report.warn(
            "the towers have batch norms, which know the rows of their rank and chunk alone: the run depends on "
            "the number of ranks and on --chunk-size"
        )
    if warmup_steps(options, trainer.total_steps) > trainer.total_steps:
        report.warn(f"--warmup {options.warmup} is longer than the run: --lr {options.lr} is never reached")
    if trainer.resumed is None:
        return
    path, ranks, config = trainer.resumed
    report.say(f"resumed from {path.name} after step {trainer.progress.step}")
    if trainer.progress.step >= trainer.total_steps:
        report.say(f"all {trainer.total_steps} steps are done. More --steps or --epochs go on.")
    if ranks != trainer.world.size:
        report.warn(f"there were {ranks} ranks, now there are {trainer.world.size}: the last bits will differ")
    now = asdict(trainer.config)
    for section, before in config.items():
        for name, value in before.items():
            if section != "run" and now[section].get(name) != value:
                report.warn(f"--{name.replace('_', '-')} was {value}, now it is {now[section].get(name)}")
