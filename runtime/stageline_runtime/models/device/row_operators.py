"""Row operations of a layer on a device, through `row_kernels`: a `RowOperators`, and rotation of heads.

Grids and constants follow from shapes alone, so that a captured launch is right for every plan of its size.
"""

import torch

from stageline_runtime.models.layers.row_modules import RmsNorm
from stageline_runtime.models.layers.step_batch import next_power_of_two

GATE_BLOCK = 1024
"""Columns of the gate that one program computes."""
ROTATED_HEADS = 16
"""Heads of a token that one program rotates."""
WIDE_ROW = 4096
"""Rows from this size on are normalised by twice as many warps."""


class TritonRows:
    """The kernels' launches. Raises ImportError where there is no Triton, as in CPU builds of torch."""

    def __init__(self) -> None:
        from stageline_runtime.models.device import row_kernels

        self._kernels = row_kernels

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`rows / rms(rows) * weight` for rows `[num_rows, size]`."""
        return self._normalise(rows, None, weight, eps)

    def add_rms_norm(self, rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The same of `rows + addend`; the sum takes `addend`'s place."""
        return self._normalise(rows, addend, weight, eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` `[num_rows, size]` for rows `[gate, up]` `[num_rows, 2 * size]`."""
        assert gate_up.is_contiguous(), gate_up.stride()
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, size)
        if num_rows:
            self._kernels.gate_rows[(num_rows, -(-size // GATE_BLOCK))](gate_up, output, SIZE=size, BLOCK=GATE_BLOCK)
        return output

    def rotate(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, norm: RmsNorm | None
    ) -> torch.Tensor:
        """Heads `[num_tokens, num_heads, head_dim]`, of which tokens may lie apart, normalised by `norm` and rotated.

        Cosines and sines are `[num_tokens, 1, head_dim]`, `norm`'s weight `[num_heads, head_dim]`.
        """
        num_tokens, num_heads, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1), heads.stride()
        assert cosines.is_contiguous(), cosines.stride()
        assert sines.is_contiguous(), sines.stride()
        assert norm is None or norm.weight.shape == (num_heads, head_dim), norm.weight.shape
        assert norm is None or norm.weight.is_contiguous(), norm.weight.stride()
        output = heads.new_empty(num_tokens, num_heads, head_dim)
        if not num_tokens:
            return output
        self._kernels.rotate_heads[(num_tokens, -(-num_heads // ROTATED_HEADS))](
            heads,
            cosines,
            sines,
            heads if norm is None else norm.weight,
            output,
            heads.stride(0),
            0.0 if norm is None else norm.eps,
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            BLOCK_HEADS=ROTATED_HEADS,
            BLOCK_HALF=next_power_of_two(head_dim // 2),
            HAS_NORM=norm is not None,
        )
        return output

    def _normalise(
        self, rows: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        num_rows, size = rows.shape
        assert rows.is_contiguous(), rows.stride()
        assert weight.shape == (size,), weight.shape
        assert addend is None or (addend.shape == rows.shape and addend.is_contiguous()), rows.shape
        output = torch.empty_like(rows)
        if num_rows:
            self._kernels.normalise_rows[(num_rows,)](
                rows,
                rows if addend is None else addend,
                weight,
                output,
                eps,
                SIZE=size,
                BLOCK=next_power_of_two(size),
                HAS_ADDEND=addend is not None,
                num_warps=4 if size < WIDE_ROW else 8,
            )
        return output
