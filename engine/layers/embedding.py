"""Token ids to hidden states."""

import torch


class Embedding:
    """A table with one row per token id. The weight may also be the head's (tied embeddings)."""

    def __init__(
        self,
        num_rows: int,
        size: int,
        weight_dtype: torch.dtype,
        activation_dtype: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        """scale: multiplies what comes out, rounded to the weight's dtype as the model was trained (Gemma)."""
        self.num_rows = num_rows
        self.size = size
        self.weight_dtype = weight_dtype
        self.activation_dtype = activation_dtype
        self.scale = torch.tensor(scale, dtype=weight_dtype).item()
        self.weight: torch.Tensor | None = None
        """[num_rows, size], from `allocate` on."""

    def allocate(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make room for the weight, to be filled by the caller."""
        self.weight = torch.empty(self.num_rows, self.size, dtype=self.weight_dtype, device=device)
        return self.weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] int64, each a row → [num_tokens, size] in the activations' dtype, newly allocated."""
        assert self.weight is not None
        hidden = self.weight.index_select(0, token_ids).to(self.activation_dtype)
        return hidden if self.scale == 1.0 else hidden.mul_(self.scale)
