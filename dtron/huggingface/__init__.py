"""Speed for Hugging Face models: attention kernels, a chunked loss, and a plan for `parallelize`.

Importing this package registers `attn_implementation="dtron"` with transformers.
"""

from dtron.huggingface.attention import register
from dtron.huggingface.plan import fast_plan

__all__ = ["fast_plan"]

register()
