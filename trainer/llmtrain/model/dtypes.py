"""torch's names of the dtypes that a recipe may compute in."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
