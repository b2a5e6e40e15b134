"""torch's "cuda" device on CPU memory: tensors, streams, events, graphs and DLPack.

A tensor is "on the device" when its memory is registered with the virtual GPU; torch itself knows
it as a CPU tensor. A function mode answers for it and puts new tensors on the device.
"""
