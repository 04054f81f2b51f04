"""Encoders in chunks: forward without activations, backward by running one chunk at a time again.

`chunked.py` is the public function. `batch.py` says what of the arguments is cut (`arguments.py`: one of them,
`tokens.py`: by a budget of tokens, `transfer.py`: on the way to a device), `outputs.py` puts the pieces together again.
`replay.py` runs the chunks, `leaves.py` finds where their gradients go and adds them up, `state.py` makes the second
run equal to the first, `seam.py` is the seam to autograd. `ddp.py` and `shards.py` know the wrappers that reduce
gradients; `modules.py` and `nested.py` look into what people pass.
"""
