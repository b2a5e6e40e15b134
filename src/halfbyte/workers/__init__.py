"""Units of work spread over processes of one machine or of a cluster, by Ray.

Importing this package imports neither Ray nor torch.
"""
