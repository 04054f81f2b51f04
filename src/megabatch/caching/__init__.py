"""Encoders in chunks: the forward keeps no activations, the backward runs one chunk at a time again.

`chunked.py` is the public function. `batch.py` splits the arguments and `outputs.py` joins the outputs, both with
`containers.py`; `transfer.py` copies chunks to a device. `replay.py` runs the chunks, `state.py` makes the second run
equal to the first. `wrappers.py` knows DistributedDataParallel and DeepSpeed, `shards.py` runs chunks under
`fully_shard`.
"""
