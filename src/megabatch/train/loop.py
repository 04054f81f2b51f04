"""The training, top to bottom.

A step is a function of the weights, the seed and its number: its samples, their augmentation and the towers' randomness
are drawn anew from (seed, step). So a run that died goes on from its last checkpoint as if nothing had been.
"""

import math
import signal
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megabatch import __version__

from ..distributed.ranks import observed_waits
from ..distributed.world import World
from . import checkpoint, optimization
from .config import Config
from .control import StepFacts, exchange
from .costs import StepCosts, check_memory
from .data import open_classes, open_held_out, open_train
from .data.loader import RankBatch, Requests, batches
from .data.order import Order
from .encoding import make_encoder, make_prepare
from .evaluate import Figures, RunFailed, evaluate
from .feature_cache import FeatureCache
from .fingerprint import difference
from .introduction import introduce
from .loading import OTHER_MODEL, restore
from .objective import Objective
from .report import Report, SilentReport
from .signals import leaving_when_asked
from .skipped import SkipList
from .towers import Towers, make_towers
from .towers.open_clip import OpenClipTowers

_FEW_SAMPLES = 1000  # of which any share may be skipped: too few to tell


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


class Trainer:
    """A run: everything that lives from its first step to its last."""

    def __init__(
        self, config: Config, world: World, folder: Path, resume: tuple[Path, checkpoint.State] | None = None
    ) -> None:
        self.config, self.world, self.folder = config, world, folder
        torch.manual_seed(config.run.seed)
        scale = config.loss.init_logit_scale
        self.towers = make_towers(config.model, loss=config.loss.loss, init_logit_scale=scale)
        self.source, self.held_out = open_train(config, world), open_held_out(config, world)
        self.classes = open_classes(config)
        sources = {"train": self.source, "val": self.held_out, "zeroshot": self.classes}
        self.data = {name: source.fingerprint() for name, source in sources.items() if source is not None}

        options = config.optimization
        self.steps_per_epoch = max(1, (config.data.train_num_samples or len(self.source)) // options.global_batch_size)
        self.total_steps = options.steps or options.epochs * self.steps_per_epoch
        check_memory(self.towers, options.global_batch_size, world, texts_only=self.source.texts_only)

        if self.source.texts_only:  # nothing goes through it
            self.towers.lock_image()
        self.towers.to(world.device)
        self.running_statistics = optimization.running_statistics(self.towers)
        self.parameters = [parameter for parameter in self.towers.parameters() if parameter.requires_grad]
        self.optimizer = optimization.make_optimizer(self.towers.model.named_parameters(), options)
        self.scaler = optimization.make_scaler(world.device, options.precision)
        self.average: AveragedModel | None = None
        if options.ema_decay is not None:
            averaging: Any = get_ema_multi_avg_fn  # which torch has not typed
            self.average = AveragedModel(self.towers, multi_avg_fn=averaging(options.ema_decay))
        self.cache: FeatureCache | None = None
        if config.model.feature_cache is not None and not self.source.texts_only:
            self.cache = FeatureCache.of(config.model.feature_cache, self.towers, options.precision)
        self.costs = StepCosts(self.towers, world, options.precision, texts_only=self.source.texts_only)
        several = config.data.captions == "all" and not self.source.texts_only
        has_negatives = self.source.has_negatives and not several
        self.objective = Objective(config.loss, world, has_negatives=has_negatives, several_captions=several)
        self.checkpoints = checkpoint.Checkpoints(folder / "checkpoints", config.run.keep)
        self.progress, self.figures, self.saved = Progress(), Figures(), 0
        self.resumed: tuple[Path, int, dict[str, dict[str, object]]] | None = None
        self.report: Report = SilentReport()
        self.skips = SkipList(folder / "skipped.jsonl")
        if resume is not None:
            self._restore(*resume)
        self._agree()

    def _agree(self) -> None:
        """Ranks that train on different data, or from different weights, would do so without a word."""
        facts = {
            "number of samples": len(self.source),
            "number of validation samples": len(self.held_out or ()),
            "fingerprint of the data": optimization.stable_seed(repr(self.data)),
            "settings": asdict(self.config),
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
        introduce(self)
        ready = partial(self.costs.mark, "towers")
        encoder = make_encoder(self.towers, self.config, self.world, ready, texts_only=self.source.texts_only)
        self.towers.train()
        with leaving_when_asked() as asked, closing(self._batches()) as loaded:
            self._evaluate_and_save(leaving=False)  # what a run that was asked to leave has left undone
            started = time.perf_counter()
            for batch in loaded:
                data_seconds = time.perf_counter() - started
                facts, values = self._step(encoder, batch, max(asked, default=0))
                values |= self.costs(facts.rows, data_seconds, time.perf_counter() - started)
                self.report.step(self.progress.step, values)
                if self.progress.nonfinite_in_a_row >= self.config.optimization.max_nonfinite:
                    raise RunFailed(
                        f"{self.progress.nonfinite_in_a_row} steps in a row taught nothing. Their samples are in "
                        "nonfinite.jsonl. If those could not be read, look at the data; else go on from the last "
                        "checkpoint with a lower --lr, --grad-clip-norm, or --precision amp_bf16 for amp."
                    )
                self._evaluate_and_save(leaving=facts.signal > 0)
                self._check_skipped()
                if facts.signal:
                    name = signal.Signals(facts.signal).name
                    self.report.say(f"{name}: left after step {self.progress.step}, saved.")
                    return facts.signal
                started = time.perf_counter()
        if self.progress.skipped_samples:
            self.report.warn(f"bad samples were skipped {self.progress.skipped_samples} times in all")
        return 0

    def _check_skipped(self) -> None:
        skipped, most = self.progress.skipped_samples, self.config.data.max_skipped
        if skipped > most * max(self.progress.samples + skipped, _FEW_SAMPLES):
            raise RunFailed(
                f"--max-skipped must be at least the share of samples that are skipped, got {most:g}, and "
                f"{skipped} of {self.progress.samples + skipped} were: {self.skips.summary()}. All of them are in "
                "skipped.jsonl. Fix the data, or allow more, and continue with --resume latest."
            )

    @property
    def _order(self) -> Order:
        """One for each thread: it remembers where it is."""
        source, config = self.source, self.config
        return Order(
            source.counts,
            seed=config.run.seed,
            batch_size=config.optimization.global_batch_size,
            block=source.block,
            weights=source.weights,
            resampled=config.data.dataset_resampled,
        )

    def _batches(self) -> Generator[RankBatch, None, None]:
        config, world, first, last = self.config, self.world, self.progress.step, self.total_steps
        requests = Requests(self._order, world.rank, world.size, first, last, self.skips.lost)
        prepare = make_prepare(self.towers, config, train=True, cache=self.cache)
        return batches(self.source, prepare, requests, workers=config.data.workers, device=world.device)

    # ---- a step

    def _step(self, encoder: nn.Module, batch: RankBatch, signal: int) -> tuple[StepFacts, Figures]:
        """What happened. A step without a finite loss and gradient changes nothing, on all ranks."""
        options, step = self.config.optimization, self.progress.step
        self.skips.note(batch)
        before = self.progress.nonfinite_in_a_row > 0
        mine = StepFacts(len(batch.ids), len(batch.bad), len(self.skips.new), before, signal)
        read_facts = exchange(self.world, mine)
        lr = optimization.learning_rate(step, options, self.total_steps, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scale = self.towers.logit_scale.exp().item()
        values = dict.fromkeys(("train/loss", "train/accuracy", "train/grad_norm"), math.nan)
        if mine.rows or read_facts().rows:
            # Towers may draw random numbers. They are the step's, whatever came before.
            torch.manual_seed(optimization.stable_seed(self.config.run.seed, step, self.world.rank))
            with observed_waits(self.costs.waiting):
                values = self._descend(encoder, batch)
        facts = read_facts()
        if facts.unlisted:
            self.report.warn(f"step {step + 1}: skipped bad samples: {self.skips.write_new(self.world)}")
        self._count(values, facts)
        return facts, {
            **values,
            "train/lr": lr,
            "train/logit_scale": scale,
            "train/epoch": step // self.steps_per_epoch,
            "train/samples": self.progress.samples,
            "train/skipped_samples": self.progress.skipped_samples,
            "train/nonfinite_steps": self.progress.nonfinite_steps,
        }

    def _descend(self, encoder: nn.Module, batch: RankBatch) -> Figures:
        options = self.config.optimization
        statistics = [buffer.clone() for buffer in self.running_statistics]
        self.optimizer.zero_grad()
        self.costs.mark("start")
        with optimization.autocast(self.world.device, options.precision):
            features = encoder(batch)
            self.costs.mark("towers")
            loss, accuracy = self.objective(features, batch.ids, batch.negative_ids)
        self.costs.mark("loss")
        # Gradients of features: the loss's part of the backward is done.
        register_multi_grad_hook(features[:2], lambda _: self.costs.mark("loss"), mode="any")
        if self.cache is not None and batch.keys is not None and batch.known is not None:
            self.cache.put(batch.keys[~batch.known], features.first[~batch.known.to(features.first.device)])
        torch.autograd.backward(self.scaler.scale(loss))
        # Since its last gradients were ready, a rank has waited for those of the others.
        self.costs.mark("towers" if self.world.group is None else "communication")
        self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients, error_if_nonfinite=False)
        values = {"train/loss": loss.item(), "train/accuracy": accuracy.item(), "train/grad_norm": norm.item()}
        # Of the loss over all ranks, and of the gradients that they share: the same on each.
        if optimization.is_finite(values):
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

    def _count(self, values: Figures, facts: StepFacts) -> None:
        if facts.nonfinite not in (0, self.world.size):
            raise RuntimeError(
                f"train: step {self.progress.step} must be finite on all ranks or on none, got {facts.nonfinite} of "
                f"{self.world.size} on which it was not: their weights differ now. Look for a faulty device, and "
                "resume from the last checkpoint."
            )
        progress, names = self.progress, []
        if not optimization.is_finite(values):
            _, indices = self._order.of_step(progress.step)
            names = [self.source.name(index) for index in indices.tolist()]
        progress.step += 1
        progress.samples += facts.rows
        progress.skipped_samples += facts.skipped
        progress.nonfinite_in_a_row = progress.nonfinite_in_a_row + 1 if names else 0
        if names:
            progress.nonfinite_steps += 1
            loss, norm = values["train/loss"], values["train/grad_norm"]
            what = f"loss {loss}, gradient norm {norm}" if facts.rows else "none of its samples could be read"
            self.report.warn(
                f"step {progress.step}: {what}: nothing was learned from it, on any rank "
                f"({progress.nonfinite_in_a_row} in a row, {progress.nonfinite_steps} in all). Its samples are in "
                "nonfinite.jsonl."
            )
            self.report.not_finite(progress.step, values, names)

    # ---- now and then

    def _due(self, steps: int | None, epochs: int) -> bool:
        """What is done every so many steps or, where that is not given, epochs; and after the last step."""
        step, interval = self.progress.step, steps or epochs * self.steps_per_epoch
        return step > 0 and (step == self.total_steps or (interval > 0 and step % interval == 0))

    def _evaluate_and_save(self, *, leaving: bool) -> None:
        """Where either is due. Who is asked to leave saves, and evaluates when the run goes on."""
        best, val, run = False, self.config.evaluation, self.config.run
        if self.cache is not None and (leaving or self._due(None, epochs=1)):
            self.cache.flush()
        val_due = self._due(val.val_steps, val.val_frequency) and self.progress.evaluated < self.progress.step
        if val_due and not leaving:
            try:
                best = self._evaluate()
            except Exception:
                if not self.progress.nonfinite_in_a_row:
                    self.save()
                raise
        # Weights that give no finite loss must not push out those that did.
        due = self._due(run.save_steps, run.save_frequency) and not self.progress.nonfinite_in_a_row
        if best or leaving or (due and self.progress.step > self.saved):
            self.save(best)

    def _evaluate(self) -> bool:
        """Whether this is the best so far."""
        if self.world.group is not None:  # each rank has its own, which depend on its rows
            for buffer in self.running_statistics:
                dist.broadcast(buffer, 0, group=self.world.group)
        towers = self.towers if self.average is None else cast(Towers, self.average.module)
        figures = evaluate(towers, self.held_out, self.classes, self.config, self.world)
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
                "config": asdict(self.config),
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
        with checkpoint.reading(path, f"--model {self.config.model.model}", OTHER_MODEL):
            kept = state["megabatch"]
            other = None if self.config.run.allow_changed_data else difference(kept["data"], self.data)
            self.progress = Progress(**kept["progress"])
            self.figures = Figures(kept["figures"])
            self.resumed = (path, kept["ranks"], kept["config"])
            self._restore_weights(state)
        if other is not None:
            raise ValueError(
                f"train: --resume {path} must find the data that it was trained on, got other data: {other}. Put it "
                "back, or give --allow-changed-data to go on with what there is now."
            )
        self.saved = self.progress.step
        self.progress.nonfinite_in_a_row = 0  # whoever resumes wants to go on

    def _restore_weights(self, state: checkpoint.State) -> None:
        groups, saved = self.optimizer.state_dict()["param_groups"], state["optimizer"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved["param_groups"]]:
            raise ValueError("another number of parameters: --lock-image and the kind of data must be those of its run")
        if not saved["state"] and self.progress.step > self.progress.nonfinite_steps:
            raise ValueError(f"no state of the optimizer after {self.progress.step} steps")
        restore(self.towers, state, averaged=False)
        # What is asked for counts, not what was: the groups keep their settings.
        self.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
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
