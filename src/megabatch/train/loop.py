"""The training, top to bottom.

A step is a function of the weights, the seed and its number: its samples, their augmentation and the towers' randomness
are drawn anew from (seed, step). So a run that died goes on from its last checkpoint as if nothing had been.
"""

import hashlib
import math
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megabatch import __version__

from ..distributed.world import World
from . import checkpoint
from .checkpoint import Checkpoints
from .config import Config, to_mapping
from .data.labelled import ImageFolder
from .data.loader import Batch, batches
from .data.order import Order
from .data.source import Source
from .datasets import open_classes, open_held_out, open_train
from .encoding import Encoder, make_prepare
from .evaluate import Figures, evaluate_all
from .feature_cache import FeatureCache
from .fingerprint import difference
from .flops import flops_per_sample, peak_flops
from .loading import restore
from .objective import Objective
from .optimization import autocast, learning_rate, make_optimizer, make_scaler, warmup_steps
from .report import Report
from .signals import leaving_when_asked
from .towers import Towers, make_towers
from .towers.open_clip import OpenClipTowers

NAMED = 5  # skipped samples of a step in a line of the log


class Diverged(RuntimeError):
    """Too many steps in a row without a finite loss and gradient."""


@dataclass
class Progress:
    """How far a run is, besides its weights. `step` counts those that are done."""

    step: int = 0
    samples: int = 0
    skipped_samples: int = 0
    nonfinite_steps: int = 0
    nonfinite_in_a_row: int = 0
    evaluated: int = 0  # the last step after which there was an evaluation
    best: float = -math.inf


@dataclass(frozen=True)
class Told:
    """What ranks tell each other before a step: rows of all, samples that were skipped, a signal that asks to leave."""

    rows: int
    bad: list[tuple[str, str]]
    signal: int


class Trainer:
    """A run: everything that lives from its first step to its last."""

    def __init__(
        self, config: Config, world: World, folder: Path, resume: tuple[Path, checkpoint.State] | None = None
    ) -> None:
        self.config, self.world, self.folder = config, world, folder
        torch.manual_seed(config.run.seed)
        self.towers: Towers = make_towers(
            config.model, loss=config.loss.loss, init_logit_scale=config.loss.init_logit_scale
        )
        self.source: Source = open_train(config)
        self.held_out: Source | None = open_held_out(config)
        self.classes: ImageFolder | None = open_classes(config)
        sources = {"train": self.source, "val": self.held_out, "zeroshot": self.classes}
        self.data = {name: source.fingerprint() for name, source in sources.items() if source is not None}

        options = config.optimization
        self.steps_per_epoch = max(1, (config.data.train_num_samples or len(self.source)) // options.global_batch_size)
        self.total_steps = options.steps or options.epochs * self.steps_per_epoch
        self.order = Order(self.source.shards, seed=config.run.seed, resampled=config.data.dataset_resampled)

        if self.source.texts_only:  # nothing goes through it
            self.towers.lock_image()
        self.towers.to(world.device)
        self.running_statistics = running_statistics(self.towers)
        self.parameters = [parameter for parameter in self.towers.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.towers.model.named_parameters(), options)
        self.scaler = make_scaler(world.device, options.precision)
        self.average: AveragedModel | None = None
        if options.ema_decay is not None:
            averaging: Any = get_ema_multi_avg_fn  # which torch has not typed
            self.average = AveragedModel(self.towers, multi_avg_fn=averaging(options.ema_decay))
        self.cache: FeatureCache | None = None
        if config.model.feature_cache is not None and not self.source.texts_only:
            self.cache = FeatureCache.of(config.model.feature_cache, self.towers, options.precision)
        self.flops = flops_per_sample(self.towers, texts_only=self.source.texts_only)
        self.peak_flops = peak_flops(world.device, options.precision)
        self.objective = Objective(config.loss, world, has_negatives=self.source.has_negatives)
        self.checkpoints = Checkpoints(folder / "checkpoints", config.run.keep)
        self.progress, self.figures, self.saved = Progress(), Figures(), 0
        self.resumed: tuple[Path, int, dict[str, dict[str, object]]] | None = None
        self.report = Report.silent()
        self.named: set[str] = set()  # bad samples that the log has named
        if resume is not None:
            self._restore(*resume)
        self._agree()

    def _agree(self) -> None:
        """Ranks that train on different data, or from different weights, would do so without a word."""
        held_out = None if self.held_out is None else len(self.held_out)
        facts = {
            "number of samples": len(self.source),
            "number of validation samples": held_out,
            "fingerprint of the data": stable_seed(repr(self.data)),
            "settings": to_mapping(self.config),
            "step to go on from": self.progress.step,
        }
        for other, theirs in enumerate(self.world.gather(facts)):
            for name, value in facts.items():
                if theirs[name] != value:
                    raise ValueError(
                        f"train: the {name} must be the same on every rank, got {value} on rank {self.world.rank} and "
                        f"{theirs[name]} on rank {other}. Do all ranks see the same folders?"
                    )

    # ---- the run

    def run(self, report: Report) -> int:
        """Until the last step, which returns 0, or until a signal asks to leave, which returns its number."""
        self.report = report
        self._introduce()
        encoder = self._wrapped_encoder()
        self.towers.train()
        with leaving_when_asked() as asked:
            self._evaluate_and_save(leaving=False)  # what a run that was asked to leave has left undone
            started = time.perf_counter()
            for batch in self._batches():
                data_seconds = time.perf_counter() - started
                told = self._tell(batch, asked)
                values = self._step(encoder, batch, told)
                self.progress.step += 1
                values |= self._costs(told, data_seconds, time.perf_counter() - started)
                self.report.step(self.progress.step, values)
                if self._diverged:
                    raise Diverged(
                        f"{self.progress.nonfinite_in_a_row} steps in a row taught nothing. Their samples are in "
                        "nonfinite.jsonl. If those could not be read, look at the data; else go on from the last "
                        "checkpoint with a lower --lr, --grad-clip-norm, or --precision amp_bf16 for amp."
                    )
                self._evaluate_and_save(leaving=told.signal > 0)
                if told.signal:
                    self.report.say(f"{signal.Signals(told.signal).name}: left after step {self.progress.step}, saved.")
                    return told.signal
                started = time.perf_counter()
        if self.progress.skipped_samples:
            self.report.warn(f"bad samples were skipped {self.progress.skipped_samples} times in all")
        return 0

    def _wrapped_encoder(self) -> nn.Module:
        options = self.config.optimization
        rows = min(options.chunk_size, -(-options.global_batch_size // self.world.size))
        encoder = Encoder(self.towers, rows, texts_only=self.source.texts_only)
        if self.config.model.torchcompile:
            for part in self.towers.compiled_parts():
                part.compile()
        if self.world.group is None:
            return encoder
        return DistributedDataParallel(encoder, gradient_as_bucket_view=True)

    def _batches(self) -> Iterator[Batch]:
        return batches(
            self.source,
            make_prepare(self.towers, self.config, train=True, cache=self.cache),
            self.order,
            batch_size=self.config.optimization.global_batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            workers=self.config.data.workers,
            first_step=self.progress.step,
            last_step=self.total_steps,
            pin_memory=self.world.device.type == "cuda",
        )

    def _tell(self, batch: Batch, asked: list[int]) -> Told:
        everyones = self.world.gather([len(batch.ids), batch.bad, max(asked, default=0)])
        rows, bad, signals = zip(*everyones, strict=True)
        told = Told(sum(rows), [(name, reason) for each in bad for name, reason in each], max(signals))
        self.progress.samples += told.rows
        self.progress.skipped_samples += len(told.bad)
        if new := [bad for bad in told.bad if bad[0] not in self.named]:
            names = ", ".join(f"{name} ({reason})" for name, reason in new[:NAMED])
            more = f", and {len(new) - NAMED} more" if len(new) > NAMED else ""
            self.report.warn(f"step {batch.step + 1}: skipped bad samples: {names}{more}")
            self.named |= {name for name, _ in new}
        return told

    # ---- a step

    def _step(self, encoder: nn.Module, batch: Batch, told: Told) -> Figures:
        """What happened. A step without a finite loss and gradient changes nothing, on all ranks."""
        options, step = self.config.optimization, self.progress.step
        lr = learning_rate(step, options, self.total_steps, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scale = self.towers.logit_scale.exp().item()
        values = {"train/loss": math.nan, "train/accuracy": math.nan, "train/grad_norm": math.nan}
        if told.rows:
            # Towers may draw random numbers. They are the step's, whatever came before.
            torch.manual_seed(stable_seed(self.config.run.seed, step, self.world.rank))
            values = self._descend(encoder, batch)
        self._count_nonfinite(values, told)
        return {**values, "train/lr": lr, "train/logit_scale": scale}

    def _descend(self, encoder: nn.Module, batch: Batch) -> Figures:
        options = self.config.optimization
        statistics = [buffer.clone() for buffer in self.running_statistics]
        self.optimizer.zero_grad()
        with autocast(self.world.device, options.precision):
            features = encoder(batch)
            loss, accuracy = self.objective(features, batch.ids, batch.negative_ids)
        if self.cache is not None and batch.keys is not None and batch.known is not None:
            self.cache.put(batch.keys[~batch.known], features.first[~batch.known.to(features.first.device)])
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients, error_if_nonfinite=False)
        values = {
            "train/loss": loss.item(),
            "train/accuracy": accuracy.item(),
            "train/grad_norm": norm.item(),
        }
        if all(self.world.gather(is_finite(values))):
            if options.grad_clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, options.grad_clip_norm, norm)
            self.scaler.step(self.optimizer)
            with torch.no_grad():
                self.towers.logit_scale.clamp_(0, math.log(self.config.loss.max_logit_scale))
            if self.average is not None:
                self.average.update_parameters(self.towers)
        else:
            for buffer, before in zip(self.running_statistics, statistics, strict=True):
                buffer.copy_(before)
        self.scaler.update()
        return values

    def _count_nonfinite(self, values: Figures, told: Told) -> None:
        if is_finite(values):
            self.progress.nonfinite_in_a_row = 0
            return
        self.progress.nonfinite_steps += 1
        self.progress.nonfinite_in_a_row += 1
        step, loss, norm = self.progress.step + 1, values["train/loss"], values["train/grad_norm"]
        what = f"loss {loss}, gradient norm {norm}" if told.rows else "none of its samples could be read"
        self.report.warn(
            f"step {step}: {what}: nothing was learned from it, on any rank "
            f"({self.progress.nonfinite_in_a_row} in a row, {self.progress.nonfinite_steps} in all). Its samples are "
            "in nonfinite.jsonl."
        )
        _, indices = self.order.of_step(self.progress.step, self.config.optimization.global_batch_size)
        self.report.not_finite(step, values, [self.source.name(index) for index in indices.tolist()])

    @property
    def _diverged(self) -> bool:
        return self.progress.nonfinite_in_a_row >= self.config.optimization.max_nonfinite

    def _costs(self, told: Told, data_seconds: float, seconds: float) -> Figures:
        flops = self.flops * told.rows / self.world.size / seconds
        return {
            "train/epoch": (self.progress.step - 1) // self.steps_per_epoch,
            "train/samples": self.progress.samples,
            "train/samples_per_second": told.rows / seconds,
            "train/data_seconds": data_seconds,
            "train/step_seconds": seconds,
            "train/tflops_per_second": flops / 1e12,
            **({} if self.peak_flops is None else {"train/mfu": flops / self.peak_flops}),
            "train/memory_mib": peak_mib(self.world.device),
            "train/skipped_samples": self.progress.skipped_samples,
            "train/nonfinite_steps": self.progress.nonfinite_steps,
        }

    # ---- now and then

    @property
    def _val_steps(self) -> int:
        options = self.config.evaluation
        return options.val_steps or options.val_frequency * self.steps_per_epoch

    @property
    def _save_steps(self) -> int:
        options = self.config.run
        return options.save_steps or options.save_frequency * self.steps_per_epoch

    def _due(self, interval: int) -> bool:
        step = self.progress.step
        return step > 0 and (step == self.total_steps or (interval > 0 and step % interval == 0))

    def _evaluate_and_save(self, *, leaving: bool) -> None:
        """Where either is due. Who is asked to leave saves, and evaluates when the run goes on."""
        best = False
        if self.cache is not None and (leaving or self._due(self.steps_per_epoch)):
            self.cache.flush()
        if not leaving and self._due(self._val_steps) and self.progress.evaluated < self.progress.step:
            try:
                best = self._evaluate()
            except Exception:
                if not self.progress.nonfinite_in_a_row:
                    self.save()
                raise
        # Weights that give no finite loss must not push out those that did.
        due = self._due(self._save_steps) and not self.progress.nonfinite_in_a_row
        if best or leaving or (due and self.progress.step > self.saved):
            self.save(best)

    def _evaluate(self) -> bool:
        """Whether this is the best so far."""
        if self.world.group is not None:  # each rank has its own, which depend on its rows
            for buffer in self.running_statistics:
                dist.broadcast(buffer, 0, group=self.world.group)
        towers = self.towers if self.average is None else cast(Towers, self.average.module)
        figures = evaluate_all(towers, self.held_out, self.classes, self.config, self.world)
        self.progress.evaluated = self.progress.step
        if not figures:
            return False
        self.figures = figures
        self.report.validation(self.progress.step, figures)
        value = figures.get("val/mean_recall", figures.get("zeroshot/top1", -math.inf))
        if value <= self.progress.best:
            return False
        self.progress.best = value
        return True

    def save(self, is_best: bool = False) -> None:
        self.saved = self.progress.step
        if self.world.rank:
            return
        step = self.progress.step
        state = {
            "epoch": step // self.steps_per_epoch,
            "name": self.folder.name,
            "state_dict": self.towers.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "global_step": step,
            "samples_seen": self.progress.samples,
            "megabatch": {
                "version": __version__,
                "config": to_mapping(self.config),
                "progress": asdict(self.progress),
                "ranks": self.world.size,
                "preprocessing": asdict(self.towers.preprocessing),
                "texts_only": self.source.texts_only,
                "figures": self.figures,
                "data": self.data,
            },
        }
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["state_dict_ema"] = cast(Towers, self.average.module).model.state_dict()
        for_open_clip = isinstance(self.towers, OpenClipTowers)
        path = self.checkpoints.write(state, is_best=is_best, for_open_clip=for_open_clip)
        self.report.say(f"saved {path.name}" + (", the best so far" if is_best else ""))

    def _restore(self, path: Path, state: checkpoint.State) -> None:
        with checkpoint.reading(path, f"--model {self.config.model.model}"):
            kept = state["megabatch"]
            other = None if self.config.run.allow_changed_data else difference(kept["data"], self.data)
            self._restore_weights(state)
            self.progress = Progress(**kept["progress"])
            self.figures = Figures(kept["figures"])
            self.resumed = (path, kept["ranks"], kept["config"])
        if other is not None:
            raise ValueError(
                f"train: --resume {path} must find the data that it was trained on, got other data: {other}. Put it "
                "back, or give --allow-changed-data to go on with what there is now."
            )
        self.saved = self.progress.step
        self.progress.nonfinite_in_a_row = 0  # whoever resumes wants to go on

    def _restore_weights(self, state: checkpoint.State) -> None:
        groups, saved = self.optimizer.param_groups, state["optimizer"]["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError("another number of parameters. Are --lock-image and the kind of data those of its run?")
        # What is asked for counts, not what was: load_state_dict would put the old settings back.
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        restore(self.towers, state, averaged=False)
        self.optimizer.load_state_dict(state["optimizer"])
        for group, asked in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(asked)
        for parameter, values in self.optimizer.state.items():
            for name in ("step", "exp_avg", "exp_avg_sq"):
                if name != "step" and values[name].shape != parameter.shape:
                    raise ValueError(f"{name} has another shape than its parameter")
                values[name] = values[name].clone()  # the checkpoint's own is in its file
        if self.scaler.is_enabled() and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:  # from here on, where the run had none
            restore(cast(Towers, self.average.module), state)
            self.average.n_averaged.fill_(1)

    def _introduce(self) -> None:
        report, options = self.report, self.config.optimization
        count = sum(parameter.numel() for parameter in self.parameters)
        report.say(
            f"{len(self.source)} samples, {options.global_batch_size} a step, {self.steps_per_epoch} steps an epoch, "
            f"{self.total_steps} steps; ranks: {self.world.size} ({self.world.device.type}); parameters to train: "
            f"{count / 1e6:.1f}M"
        )
        if options.global_batch_size > len(self.source):
            report.warn(
                f"--global-batch-size {options.global_batch_size} is more than there are samples: they come "
                f"{options.global_batch_size / len(self.source):.1f} times in a step, and an epoch is a step"
            )
        if self.running_statistics and (self.world.size > 1 or options.chunk_size < options.global_batch_size):
            report.warn(
                "the towers have batch norms, which know the rows of their rank and chunk alone: the run depends on "
                "the number of ranks and on --chunk-size"
            )
        if warmup_steps(options, self.total_steps) > self.total_steps:
            report.warn(f"--warmup {options.warmup} is longer than the run: --lr {options.lr} is never reached")
        for source in (self.source, self.held_out):
            problems: dict[str, int] = getattr(source, "problems", {})
            for reason, times in problems.items():
                report.warn(f"left out when the data was opened: {times} × {reason}")
        if self.resumed is None:
            return
        path, ranks, config = self.resumed
        report.say(f"resumed from {path.name} after step {self.progress.step}")
        if self.progress.step >= self.total_steps:
            report.say(f"all {self.total_steps} steps are done. More --steps or --epochs go on.")
        if ranks != self.world.size:
            report.warn(f"there were {ranks} ranks, now there are {self.world.size}: the last bits will differ")
        now = to_mapping(self.config)
        for section, before in config.items():
            for name, value in before.items():
                if section != "run" and now[section].get(name) != value:
                    report.warn(f"--{name.replace('_', '-')} was {value}, now it is {now[section].get(name)}")


def running_statistics(module: nn.Module) -> list[torch.Tensor]:
    """What a forward in training changes: batch norms'."""
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def is_finite(values: Figures) -> bool:
    return math.isfinite(values["train/loss"]) and math.isfinite(values["train/grad_norm"])


def stable_seed(*numbers: int | str) -> int:
    """63 bits of all of them, in their order."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big") >> 1


def peak_mib(device: torch.device) -> float:
    """The most memory that there was at a time: of the device's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
