"""Who holds which rows, and how they travel. Knows tensors and ranks, and no loss."""
