"""Measuring: `python -m megabatch.bench` and a command: loss, chunked, ring, gradients,
kernels, demo. Built on public names only, except for `kernels`, which looks at what a backend launches, and `demo`,
which trains.

In reading order. `loss`, in one process: `cases` says what is measured, `contenders` who is measured,
`rivals` is what they compute, `trial` is what one contender goes through, `measure` and `processes` are the
instruments, `report` the output.

`chunked`, towers encoded in chunks: `towers` says what is trained, `cachers` who does it, `chunked_trial` what they go
through.

`ring`, a batch spread over ranks: `crews` says who, `ring_trial` what they go through; `ranks` and `wire` are the
instruments. `gradients`, right or wrong over ranks: `peers` says who, `gradients_trial` what they go through.

`kernels`, the GPU kernels without a GPU: `targets` says for which GPUs, `compiling` what is compiled and how,
`machine_code` reads what came out, `roofline` predicts from it.

`demo`, in three acts: `growing` (a batch, until memory ends), `learning` (the trainer, three times; `retrieved` draws
what it has learned), `big_step`. `trainings` runs `megabatch train` as people do, `limited` within a memory limit.
"""
