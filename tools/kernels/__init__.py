"""The GPU kernels compiled for GPUs that are not here; and tuned on one that is."""
