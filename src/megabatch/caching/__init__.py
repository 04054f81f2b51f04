"""Encoders in chunks: forward without a graph, backward by replaying one chunk at a time.

`chunked.py` is the public function; `batch.py` says what is cut and what is not, `outputs.py` puts the pieces together
again, `replay.py` is the seam to autograd, `conditions.py` makes the second run equal to the first, and `wrappers.py`
knows the trainers that stand between an encoder and its gradients. `nested.py` walks what people pass and return.
"""
