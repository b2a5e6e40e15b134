"""The small real models that the demo and the tests run, in plain torch, from PyPI packages."""

from halfbyte.nn.models.llama import Llama, LlamaConfig
from halfbyte.nn.models.smollm2 import SmolLM2, load_smollm2

__all__ = ["Llama", "LlamaConfig", "SmolLM2", "load_smollm2"]
