"""The stand-in for the CUDA runtime: unmodified programs run on the virtual GPU, no driver needed.

`session.cuda("b200")` is the way in; `halfbyte run` and the pytest fixture `virtual_gpu` use it.
Nothing here imports CuTe DSL, CUDA bindings or torch when it is imported.
"""
