"""Products with a model's matrices, each held in the form in which its device multiplies fastest."""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

Linear = Callable[[torch.Tensor], torch.Tensor]  # float [T, in] -> a new float [T, out], bias added


def float_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """``x @ weight.T + bias`` for ``weight [out, in]``, which is not copied."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn:
        return OneDnnLinear(weight, bias)
    return lambda x: linear(x, weight, bias)


class OneDnnLinear:
    """Float32 on the CPU by oneDNN, whose products use all that the processor has, whoever made it. (torch's default,
    MKL, uses half of AMD's AVX-512: measured 1.5 to 2 times slower.)"""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product
