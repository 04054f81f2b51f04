"""What a loss is: its specification, the rows it is about, and the statistics it needs of them.

Pure: nothing here knows in which order tiles are computed, how a tile is computed, or where a block lives.
"""
