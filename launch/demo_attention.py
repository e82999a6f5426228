"""Takes attention over in a model that knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ulysses.attention import UlyssesAttention


class CausalAttentionOver(TorchFunctionMode):
    """While active, each scaled_dot_product_attention attends causally to the whole sequence.

        with CausalAttentionOver(attention, seq_lens):
            model(shard, position_ids=positions_of_the_shard)

    The model sees this rank's shard alone and must be told its positions. What goes on inside
    `attention` is not taken over again: a mode is off while its own handler runs.
    `bytes_sent` counts what left this rank, by the tilings' figures.
    """

    def __init__(self, attention: UlyssesAttention, seq_lens: Sequence[int]) -> None:
        super().__init__()
        self.attention = attention
        self.seq_lens = tuple(seq_lens)
        self.bytes_sent = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """SDPA's own [B, heads, l, D]; is_causal is not asked: a model clears it for one row."""
        del is_causal, enable_gqa
        out: Tensor = self.attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask,
            dropout_p,
            is_causal=True,
            scale=scale,
            seq_lens=self.seq_lens,
        )
        element = query.shape[0] * query.element_size()
        dim, value_dim = query.shape[3] * element, value.shape[3] * element
        tiling = self.attention.tiling
        assert tiling is not None, "it has just run"
        self.bytes_sent += tiling.bytes_sent(self.attention.rank, (dim, dim + value_dim, value_dim))
        return out.transpose(1, 2)
