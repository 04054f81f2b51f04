"""Measuring: `megabatch bench` and a benchmark by name. Built on public names only, except for `kernels` and `tiling`,
which look inside, and `demo` and `step`, which train.

One folder for each benchmark, and the same file names wherever somebody is measured: `command` is its flags and what it
prints, `contenders` who is measured, `trial` what they go through. Shared by all: `cases` says what losses are measured
on which inputs, `instruments` has the clock, the meters and the processes, `results` what is known of a contender,
`session` the run from first line to last file, `report` and `plot` what it looks like.

In reading order: `cases`, `loss/contenders` and `loss/rivals`, `loss/trial`, `instruments/measure`; the others build on
these. `loss` is one process; `ring` a batch spread over ranks; `gradients` what comes out on them; `chunked` towers
encoded in chunks; `step` the whole of a training step; `tiling` the stages of a step; `paper` and `peers` put tables
together; `kernels` looks at compiled GPU kernels; `demo` plays three acts.
"""
