"""The 4-bit product of an SVDQuant linear with its low-rank branch, channel scales and bias."""
