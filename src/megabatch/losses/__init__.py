"""What a loss is: its specification, the rows it is about, and the statistics it needs of them.

Pure: nothing here knows how the plane of logits is walked, how a tile is computed, or where a block lives.
"""
