"""`megabatch train` and `megabatch eval`: two towers, trained at any global batch.

config.py          what can be chosen: one dataclass per concern, from YAML and flags
data/              where samples come from, which ones make step t, how they become tensors
towers/            image and text encoders
loop.py            the training, top to bottom
optimization.py    parameter groups, schedule, precision
checkpoint.py      what is kept, so that a killed run resumes bit-exactly
fingerprint.py     what changes when the data does, so that no run resumes on other data
run_folder.py      the lock that leaves a folder to one run
signals.py         which signals end a run, and with what exit code
evaluate.py        validation loss, retrieval, zero-shot classification
report.py          progress bar, out.log, metrics.jsonl, TensorBoard
report_command.py  `megabatch report`, whose page is that of ../report
retrieved.py       examples of what a run retrieves
"""
